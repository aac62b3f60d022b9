"""Tiny reward models and teachers for runs of the real loop."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from tests.rl.runs import RECIPES

TEACHER = RECIPES / "tiny" / "teacher"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% if not loop.last %}+{% endif %}{% endfor %}="


def make_reward_model(folder: Path, template: str | None = None) -> Path:
    """A random sequence classifier with one label that reads what the tiny model of the demo says."""
    config = AutoConfig.from_pretrained(TEACHER)
    config.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForSequenceClassification.from_config(config)
        torch.nn.init.normal_(model.score.weight, std=0.5)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TEACHER / name, folder / name)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def plain_scores(folder: Path, texts: list[list[int]]) -> list[float]:
    """What transformers says of each text by itself."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [float(model(input_ids=torch.tensor([text])).logits[0, 0]) for text in texts]


def plain_logprobs(
    folder: Path | str, sequences: list[list[int]], temperature: float = 1.0
) -> list[torch.Tensor]:
    """What transformers says of each token after the first, sequence by sequence."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    with torch.no_grad():
        for tokens in sequences:
            ids = torch.tensor([tokens])
            every = torch.log_softmax(model(input_ids=ids).logits[0, :-1] / temperature, dim=-1)
            found.append(every.gather(1, ids[0, 1:, None]).squeeze(1))
    return found


class TeacherServer:
    """Answers as a vLLM server does that has the model: its name, tokens of text, and log-probs of prompts.

    `failures` are statuses that the next scores are answered with; `shift` is added to every token of text.
    """

    def __init__(self, folder: Path = TEACHER):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.failures: list[int] = []
        self.shift, self.num_scored, self.max_model_len = 0, 0, 64
        self.keys: set[str | None] = set()
        self._lock = threading.Lock()

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "tiny-teacher"}]}
        if path == "/tokenize":
            ids = self.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]
            return 200, {"tokens": [token + self.shift for token in ids], "max_model_len": self.max_model_len}
        assert path == "/v1/completions" and body["prompt_logprobs"] == 0 and body["model"] == "tiny-teacher"
        with self._lock:
            if self.failures:
                return self.failures.pop(), {"error": {"message": "not now"}}
            self.num_scored += 1
            ids = torch.tensor([body["prompt"]])
            with torch.no_grad():
                every = torch.log_softmax(self.model(input_ids=ids).logits[0, :-1], dim=-1)
        rows = [
            {str(token): {"logprob": float(every[place, token]), "rank": 1, "decoded_token": "?"}}
            for place, token in enumerate(body["prompt"][1:])
        ]
        return 200, {"choices": [{"text": "", "prompt_logprobs": [None, *rows]}]}


@contextmanager
def serving(server: TeacherServer) -> Iterator[str]:
    """The address of the server inside the block."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(None)

        def do_POST(self) -> None:
            self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _reply(self, body: Any) -> None:
            server.keys.add(self.headers.get("Authorization"))
            status, found = server.answer(self.path, body)
            raw = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *args: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}"
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
