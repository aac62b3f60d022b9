import torch, pytest, ctypes
from tests.models import *
from tests.ranks import run_ranks
L = {"hidden_size": 256,"intermediate_size": 1024,"num_attention_heads": 4,"num_key_value_heads": 4,"vocab_size": 1024}
def work(w, d, s):
    ctypes.CDLL(None).mallopt(-3, 64*1024)
    import shardproof as sp
    out=[]
    sp.load(w, strategy=s, device="cpu", compute_dtype=torch.float32)
    for _ in range(3):
        p=sp.load(d, strategy=s, device="cpu", compute_dtype=torch.float32)
        out.append((round(p.receipt.peak_bytes/2**20,1), round(p.receipt.shard_bytes/2**20,1)))
        del p
    return out
@pytest.mark.parametrize("layers",[8,16])
def test_x(tmp_path, layers):
    make_checkpoint(tmp_path/"w","llama"); make_checkpoint(tmp_path/"l","llama",max_shard_size="100MB",num_hidden_layers=layers,**L)
    for s in ("fsdp1","fsdp2"):
        for w in (2,4):
            print(layers, s, w, run_ranks(w, work, tmp_path/"w", tmp_path/"l", s))
