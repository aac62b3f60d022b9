"""The network interface that gloo and NCCL use between hosts.

gloo announces the address of the host's own name. Debian and Ubuntu give that name the address 127.0.1.1, so the ranks
of other hosts would look for this one on themselves. NCCL takes the first interface that it finds.
"""

from __future__ import annotations

import os

import torch.distributed as dist

from shardproof.dist.addresses import address_towards, interface_of, is_loopback

_GLOO, _NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_KEY = "shardproof/address"


def choose_interface(store: dist.Store, rank: int, world_size: int) -> None:
    """Let this process's gloo and NCCL use the interface on the way to the other hosts, unless the user chose one.

    Collective: every rank, through the store.
    """
    mine = address_towards(os.environ["MASTER_ADDR"])
    store.set(f"{_KEY}/{rank}", "" if is_loopback(mine) else mine)
    if _GLOO in os.environ and _NCCL in os.environ:
        return
    if is_loopback(mine):  # the master is this host: what matters is the way to the others
        theirs = (store.get(f"{_KEY}/{other}").decode() for other in reversed(range(world_size)))
        mine = next((address_towards(address) for address in theirs if address), mine)
    os.environ.update(interface_variables(mine))


def interface_variables(address: str) -> dict[str, str]:
    """What tells gloo and NCCL to use the interface that has this address, without what the user set."""
    name = interface_of(address)
    chosen = {_GLOO: name, _NCCL: f"={name}"}  # "=" asks for exactly this name
    return {variable: value for variable, value in chosen.items() if name and variable not in os.environ}
