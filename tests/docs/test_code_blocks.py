"""Every code block of the README and of the documentation runs, or says why not; see tests/docs/blocks.py."""

from __future__ import annotations

import contextlib
import doctest
import io
import json
import os
import sys
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.docs import shell
from tests.docs.blocks import REASONS, RUN, Block, Page, read_page
from tests.ranks import RankError, run_ranks

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).parents[2]
PAGES = [
    page
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    if (page := read_page(path)).blocks
]


def tell(page: Page, folder: str) -> list[str]:
    """Run a page from its first block to its last; returns what was done with each of them."""
    import torch.distributed as dist

    rank, done, before = dist.get_rank(), [], os.getcwd()
    os.chdir(folder)
    sys.path.insert(0, folder)
    space: dict[str, Any] = {"__name__": "page"}  # what a block guards by __main__ is for its reader to start
    try:
        for block in page.blocks:
            place = f"{page.path.name}:{block.line}"
            try:
                done.append(do(block, space, place, rank))
            except BaseException as error:
                raise AssertionError(f"{place}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(folder)
        os.chdir(before)
        for path in Path(folder).glob("*.py"):
            sys.modules.pop(path.stem, None)
    return done


def do(block: Block, space: dict[str, Any], place: str, rank: int) -> str:
    """Run one block, or only parse it; returns which."""
    if block.saved_as is not None:
        path = Path(block.saved_as)
        path.parent.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            path.write_text(block.code)
    run = block.not_run is None
    if block.language == "python":
        do_python(block.code, space, place, run)
    elif block.language == "bash" and rank == 0:
        shell.check_syntax(block.code)
        for words in shell.commands(block.code):
            shell.do(words, run)
    elif block.language == "toml":
        do_toml(block.code, place)
    elif block.language == "json":
        do_json(block.code)
    return "ran" if run else str(block.not_run)


def do_python(code: str, space: dict[str, Any], place: str, run: bool) -> None:
    if code.startswith(">>> "):
        test = doctest.DocTestParser().get_doctest(code, space, place, None, 0)
        if run:
            said = io.StringIO()
            flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            doctest.DocTestRunner(optionflags=flags).run(test, out=said.write, clear_globs=False)
            assert not said.getvalue(), said.getvalue()
        return
    program = compile(code, place, "exec", dont_inherit=True)
    if run:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(program, space)


def do_toml(code: str, place: str) -> None:
    """Check a recipe, or a part of one: what it leaves out comes from the smallest recipe."""
    from shardproof.config.load import parse_recipe

    data = tomllib.loads(code)
    smallest = {
        "model": {"path": "model"},
        "data": {"train": "train.jsonl", "evaluation": "held_out.jsonl"},
        "train": {"steps": 1},
        "output": {"folder": "run"},
        "reward": {"functions": [{"name": "numeric"}]},
    }
    is_whole = all(section in data for section in ("model", "data", "train", "output"))
    for section, values in {} if is_whole else smallest.items():
        data[section] = values | data.get(section, {})
    parse_recipe(data, place)


def do_json(code: str) -> None:
    """Parse a document, the lines of a file of rows, or the inside of an object."""
    for reading in ([code], code.splitlines(), [f"{{{code}}}"]):
        with contextlib.suppress(ValueError):
            for text in reading:
                json.loads(text)
            return
    raise ValueError("neither JSON, nor lines of JSON, nor keys of an object")


@pytest.fixture
def folder(tmp_path) -> str:
    """Where the reader of a page is: beside the clone's folders and a recipe, unless the page has its own."""
    for name in ("recipes", "scripts", "tests", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    recipe = (ROOT / "recipes" / "tiny.toml").read_text()
    (tmp_path / "recipe.toml").write_text(recipe.replace('"tiny/', '"recipes/tiny/'))
    # What `shardproof demo` leaves, which pages go on from; for the model that it trains stands the one it begins with.
    (tmp_path / "shardproof-demo").mkdir()
    for name in ("tiny", "run"):
        (tmp_path / "shardproof-demo" / name).symlink_to(ROOT / "recipes" / "tiny")
    return str(tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path.name)
def test_the_blocks_of_a_page_run(page, folder):
    done = run_ranks(page.ranks, tell, page, folder)[0]
    assert len(done) == len(page.blocks)
    expected = Counter("ran" if block.not_run is None else block.not_run for block in page.blocks)
    assert Counter(done) == expected


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path.name)
def test_a_block_that_does_not_run_says_why(page):
    for block in page.blocks:
        assert block.language in RUN, f"{page.path.name}:{block.line}: what is {block.language!r}?"
        assert block.not_run in (None, *REASONS), f"{page.path.name}:{block.line}: {block.not_run!r}"


BROKEN = {
    "python\nassert 1 == 2": "AssertionError",
    "python\n>>> 1 + 1\n3": "Expected",
    "toml\n[train]\nstep = 3": "did you mean 'train.steps'",
    'toml\n[output]\nkeep = "all"': "output.keep",
    "json\n{": "neither JSON",
    "bash\nshardproof train recipe.toml --dry": "--dry",
    "bash\nshardproof train recipe.toml train.step=3 --dry-run": "did you mean 'train.steps'",
    "bash\nshardproof train no.toml": "no.toml",
    "bash\nshardproof train recipe.toml data.train=recipe.toml": "exit code 2",
    "bash\nshardproof dotcor MODEL": "dotcor",
    "bash\nmake dmeo": "dmeo",
    "bash\npip install 'shardproof[everything]'": "everything",
    "bash\ntorchrun --nproc 2 -m shardproof train recipe.toml": "--nproc",
    "bash\nif true": "syntax error",
}


@pytest.mark.fault
@pytest.mark.parametrize(("block", "named"), BROKEN.items(), ids=lambda text: text.splitlines()[-1])
def test_a_broken_block_is_named_with_its_line(block, named, folder, tmp_path):
    (tmp_path / "page.md").write_text(f"# Page\n\n```{block}\n```\n")
    with pytest.raises(RankError) as caught:
        run_ranks(1, tell, read_page(tmp_path / "page.md"), folder)
    (_, message, _) = caught.value.errors[0]
    assert message.startswith("page.md:3: ") and named in message, message


def test_most_blocks_run():
    blocks = [block for page in PAGES for block in page.blocks]
    assert sum(block.not_run is None for block in blocks) > 0.7 * len(blocks) > 30
