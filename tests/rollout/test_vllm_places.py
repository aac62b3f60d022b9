"""Where a run's vLLM servers are: which settings cannot work, and what each server gets."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from shardproof.config.vllm import VllmSettings
from shardproof.errors import ConfigError
from shardproof.rollout.vllm_places import (
    Gpus,
    check_reach,
    check_settings,
    check_sleep,
    places,
    port_problem,
    spread_devices,
    visible_gpus,
)
from shardproof.rollout.vllm_server import Served, environment

HERE, THERE = "http://127.0.0.1:8000", "http://127.0.0.1:8001"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": "http://127.0.0.1:8000"}, "rollout.vllm.url is for mode='server'"),
        ({"mode": "server", "url": "127.0.0.1:8000"}, "must begin with http:// or unix:"),
        ({"mode": "server", "host": "0.0.0.0"}, "can be reached from other machines"),
        ({"mode": "server", "url": "http://example.com:80"}, "can be reached from other machines"),
        ({"mode": "server", "url": [HERE, "http://example.com:80"]}, "can be reached from other machines"),
        ({"mode": "server", "url": []}, "rollout.vllm.url is an empty list"),
        ({"mode": "server", "url": [HERE, "127.0.0.1:8001"]}, "must begin with http:// or unix:"),
        ({"mode": "server", "url": [HERE, THERE, HERE]}, "names 'http://127.0.0.1:8000' more than once"),
        (
            {"mode": "server", "url": [HERE, THERE], "replicas": 2},
            "replicas=2 is for servers that the run starts",
        ),
        ({"mode": "server", "url": HERE, "devices": ["0"]}, "devices is for servers that the run starts"),
        ({"mode": "server", "port": 65535, "replicas": 2}, "leaves no port for the last of 2 replicas"),
        ({"replicas": 2, "transport": "ipc"}, "transport='ipc' sends to one server, this run has 2"),
        (
            {"mode": "server", "url": [HERE, THERE], "transport": "network"},
            "there are 0 receivers for 2 urls",
        ),
        (
            {"mode": "server", "url": HERE, "transport": "network", "receivers": ["127.0.0.1:9"]},
            "needs a secret",
        ),
    ],
)
def test_a_setting_that_cannot_work_is_refused(settings, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_settings(VllmSettings(**settings))


def test_an_address_for_other_machines_is_allowed_and_warned_of():
    with pytest.warns(UserWarning, match="anyone who can connect can replace its weights"):
        check_settings(VllmSettings(mode="server", host="0.0.0.0", allow_remote=True))
    check_settings(VllmSettings(mode="server", host="::1"))
    check_settings(VllmSettings(mode="server", url="unix:/run/vllm.sock"))
    check_settings(VllmSettings(mode="server", url=[HERE, "unix:/run/vllm.sock"]))


@pytest.mark.parametrize(
    ("device", "settings", "message"),
    [
        ("cpu", {"replicas": 2, "devices": ["0"]}, "devices has 1 entries for 2 replicas"),
        ("cpu", {"replicas": 2, "devices": ["0-3", "3,4"]}, "gives '3' to replica 0 and to replica 1"),
        ("cpu", {"devices": ["a"]}, "'a', which are no CPU cores"),
        ("cpu", {"devices": ["0-3"], "tensor_parallel_size": 2}, "names 1 groups of cores, but"),
        ("cuda", {"replicas": 2, "devices": ["0", "0"]}, "gives '0' to replica 0 and to replica 1"),
        ("cuda", {"replicas": 2, "devices": ["0,1", "2"], "tensor_parallel_size": 2}, "names 1 GPUs, but"),
        ("cuda", {"devices": [","]}, "names 2 GPUs, but"),
    ],
)
def test_devices_that_cannot_be_given_are_refused(device, settings, message):
    with pytest.raises(ConfigError, match=message):
        places(VllmSettings(**settings), device)


def test_each_server_gets_a_place_of_its_own():
    found = places(VllmSettings(mode="server", replicas=3, log="run/vllm.log"))
    assert [place.name for place in found] == ["0", "1", "2"]
    assert len({place.port for place in found}) == 3 and min(place.port for place in found) > 0
    assert [place.log for place in found] == ["run/vllm-0.log", "run/vllm-1.log", "run/vllm-2.log"]
    found = places(VllmSettings(mode="server", replicas=2, port=9000, devices=["0-1", "2,3"]))
    assert [place.port for place in found] == [9000, 9001]
    assert [place.devices for place in found] == ["0-1", "2,3"]
    found = places(VllmSettings(mode="server", url=[HERE, THERE]))
    assert [(place.name, place.url) for place in found] == [("0", HERE), ("1", THERE)]
    assert places(VllmSettings(log="vllm.log"))[0].log == "vllm.log"


def test_replicas_get_gpus_of_their_own_where_there_are_enough():
    def given(num: int, trainer: int, **settings: int) -> list[str]:
        return spread_devices(VllmSettings(**settings), Gpus([str(k) for k in range(num)], trainer))

    assert given(8, 4, replicas=4) == ["4", "5", "6", "7"]  # behind the trainer's
    assert given(8, 4, replicas=2, tensor_parallel_size=2) == ["4,5", "6,7"]
    assert given(4, 4, replicas=2, tensor_parallel_size=2) == ["0,1", "2,3"]  # shared with the trainer
    assert given(2, 1, replicas=3) == ["0", "1", "0"]
    assert given(8, 4, replicas=1) == [""]  # sees what the run sees
    assert given(0, 2, replicas=2) == ["", ""]
    with pytest.raises(ConfigError, match="tensor_parallel_size=4 needs 4 GPUs, this run sees 2"):
        given(2, 1, replicas=2, tensor_parallel_size=4)


def test_devices_reach_the_server(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-a,5")
    assert visible_gpus(3) == ["3", "GPU-a", "5"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_gpus(2) == ["0", "1"]
    on_gpu, on_cpu = (Served(Path("model"), "bfloat16", device) for device in ("cuda", "cpu"))
    assert environment(VllmSettings(), on_gpu, "2,3")["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert environment(VllmSettings(), on_cpu, "0-3")["VLLM_CPU_OMP_THREADS_BIND"] == "0-3"
    assert environment(VllmSettings(), on_cpu)["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert environment(VllmSettings(), on_gpu).get("CUDA_VISIBLE_DEVICES") == os.environ.get(
        "CUDA_VISIBLE_DEVICES"
    )


def test_a_run_does_not_put_servers_of_others_to_sleep():
    with pytest.raises(ConfigError, match="was not started by this run"):
        check_sleep(VllmSettings(mode="server", url=[HERE, THERE]), "cuda", False)
    check_sleep(VllmSettings(replicas=2), "cuda", False)


def test_a_server_that_other_hosts_cannot_reach_is_named():
    check_reach([HERE, "unix:/run/vllm.sock"], [])
    check_reach(["http://10.0.0.1:8000"], [2, 3])
    for url in (HERE, "unix:/run/vllm.sock"):
        with pytest.raises(ConfigError, match=rf"ranks \[2, 3\] are on other hosts than rank 0 .* {url}"):
            check_reach([url], [2, 3])


def test_a_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert port_problem("127.0.0.1", [port]) == (port, "Address already in use")
    assert port_problem("127.0.0.1", [0]) is None
