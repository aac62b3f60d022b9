"""Each format of rows: what is read, and how its faults are named."""

import gzip
import json
import random
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardproof.errors import ConfigError
from shardproof.rl.sources.readers import read_rows


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def rows(source):
    return [row for _, row in read_rows(str(source))]


def refused(source):
    with pytest.raises(ConfigError) as caught:
        rows(source)
    assert caught.value.code == "C005"
    return str(caught.value)


def test_a_table_is_text_whatever_its_cells_look_like(tmp_path):
    text = '\ufeffprompt,answer, note \r\n"1, ""2""\nand 3",007,\r\n\r\nlast,1e3,\u2028x\r\n'
    expected = [
        {"prompt": '1, "2"\nand 3', "answer": "007", "note": ""},
        {"prompt": "last", "answer": "1e3", "note": "\u2028x"},
    ]
    assert rows(write(tmp_path / "a.csv", text)) == expected
    assert rows(write(tmp_path / "a.tsv", text.replace(",", "\t").replace("1\t ", "1, "))) == expected


def test_rows_of_a_table_are_placed_at_the_line_in_which_they_begin(tmp_path):
    source = write(tmp_path / "a.csv", 'p\n"two\nlines"\n\nthird\n')
    assert [place.rpartition(":")[2] for place, _ in read_rows(source)] == ["2", "5"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("p,a\n1,2\n1,2,3\n", "t.csv:3 has 3 cells; expected 2, one for each of the columns p, a"),
        ('p,a\n"x\ny",2\n1\n', "t.csv:4 has 1 cells"),
        ('p,a\n1,2\n"open,3\n4,5\n', "t.csv:3 cannot be read: unexpected end of data"),
        ('p,a\n1,2\n"a"b,3\n', "t.csv:3 cannot be read: ',' expected after '\"'"),
        (b"p,a\n1,2\n1,\xe9\n", "t.csv:3 is not UTF-8: invalid continuation byte at byte 3 of the line"),
        ("p,,b\n1,2,3\n", "t.csv:1: column 2 has no name"),
        ("p,a,p\n1,2,3\n", "t.csv:1 has the column 'p' twice"),
        ("p;a\n1;2\n", "t.csv:1 is one column, 'p;a': its cells look separated by ';'"),
        ("p\ta\n1\t2\n", "its cells look separated by '\\t'"),
    ],
)
def test_faults_of_a_table_are_named_by_line(tmp_path, text, said):
    assert said in refused(write(tmp_path / "t.csv", text))


def test_cells_may_be_long(tmp_path):
    assert rows(write(tmp_path / "a.csv", f"p\n{'x' * 300_000}\n")) == [{"p": "x" * 300_000}]


@pytest.mark.parametrize("begin", ["", "\ufeff", "\n" * 5000, " \t\r\n"])
def test_an_array_of_objects_is_read_as_lines_are(tmp_path, begin):
    found = [{"p": "a\u2028", "n": [1, {"x": "]"}]}, {"p": "[,]"}]
    for text in (json.dumps(found), json.dumps(found, indent=2), "[]"):
        expected = found if text != "[]" else []
        assert rows(write(tmp_path / "a.json", begin + text + "\n \n")) == expected
    lines = "".join(json.dumps(row) + "\n" for row in found * 300)
    assert rows(write(tmp_path / "lines.json", begin + lines)) == found * 300
    assert rows(write(tmp_path / "lines.json", begin + lines.rstrip())) == found * 300


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[\n{"p": 1},\n{"p": }\n]', "a.json:3 is not valid JSON: Expecting value"),
        ('[\n{"p": 1}\n{"p": 2}\n]', "a.json:3 is not valid JSON: expected ',' or ']', found '{'"),
        ('[\n{"p": 1},\n\n7]', "a.json:4 is a JSON int, expected an array of objects"),
        ('[\n{"p": 1},\n]', "a.json:3 is not valid JSON"),
        ('[{"p": 1}', "a.json:1 is not valid JSON: expected ',' or ']', found the end of the file"),
        ("[", "a.json:1 is not valid JSON"),
        ('[{"p": 1}]\n[', "a.json goes on after the end of its array: '['"),
        (b'[\n{"p": "\xff"}]', "a.json:2 is not valid JSON: 'utf-8' codec"),
        ("[" * 200_000, "a.json:1 is not valid JSON: maximum recursion"),
        ('{"p":\n 1}', "a.json:1 is not valid JSON"),
    ],
)
def test_faults_of_an_array_are_named_by_line(tmp_path, text, said):
    assert said in refused(write(tmp_path / "a.json", text))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_packed_files(tmp_path, name):
    text = "p\nx\n" if name == "a.csv" else '{"p": "x"}\n'
    packed = gzip.compress(text.encode() * 1)
    assert rows(write(tmp_path / f"{name}.gz", packed)) == [{"p": "x"}]
    assert "cannot be" in refused(write(tmp_path / f"{name}.gz", packed[:-6]))
    assert "cannot be" in refused(write(tmp_path / f"{name}.gz", b"plain"))


def test_parquet_is_read_without_threads(tmp_path):
    """Those of Arrow that still knew the file when Python ended now and then aborted the process, with its work done."""
    source = tmp_path / "a.parquet"
    written = [{"p": str(n), "n": [{"x": n}, None]} for n in range(10)]
    pq.write_table(pa.Table.from_pylist(written), source, row_group_size=3)
    assert rows(source) == written
    code = (
        "import os, pyarrow.parquet; from shardproof.rl.sources.readers import read_rows; "
        "count = lambda: len(os.listdir('/proc/self/task')); before = count(); "
        f"assert len(list(read_rows({str(source)!r}))) == 10; assert count() == before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_parquet_file_with_a_column_twice_is_refused(tmp_path):
    table = pa.Table.from_arrays([pa.array(["1"])] * 3, names=["p", "a", "a"])
    pq.write_table(table, tmp_path / "twice.parquet")
    assert "twice.parquet has the column 'a' twice" in refused(tmp_path / "twice.parquet")


def test_folders_and_patterns_are_their_files_by_name(tmp_path):
    folder = tmp_path / "shards"
    (folder / "deep").mkdir(parents=True)
    for name, text in {
        "b.jsonl": '{"p": 2}\n',
        "a.csv": "p\n1\n",
        "README.md": "no rows",
        ".c.jsonl": "hidden",
        "deep/d.jsonl": '{"p": 4}\n',
    }.items():
        write(folder / name, text)
    assert rows(folder) == [{"p": "1"}, {"p": 2}]
    assert rows(f"{folder}/*.jsonl") == [{"p": 2}]
    assert rows(f"{folder}/**/*.jsonl") == [{"p": 2}, {"p": 4}]
    write(folder / "[odd].jsonl", '{"p": 5}\n')
    assert rows(folder / "[odd].jsonl") == [{"p": 5}]  # a file that is there is no pattern
    assert "no file matches" in refused(f"{folder}/*.parquet")
    (tmp_path / "empty").mkdir()
    assert "is a folder without a .jsonl" in refused(tmp_path / "empty")


def damaged(rng, raw):
    """The bytes with a few changed, left out, doubled or added."""
    raw = bytearray(raw)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(raw) + 1)
        piece = rng.choice(
            [b"", b'"', b",", b"\n", b"[", b"]", b"{", b"\xff", b"\x00", b"\r", raw[at : at + 9] * 2]
        )
        raw[at : at + rng.randint(0, 3)] = piece
    return bytes(raw)


@pytest.mark.parametrize("name", ["a.json", "a.csv", "a.tsv", "a.jsonl.gz", "a.csv.gz"])
def test_damaged_files_are_read_or_refused_by_name(tmp_path, name):
    rng = random.Random(name)
    found = [{"p": f"row {n}", "a": 'x, "y"\n'} for n in range(4)]
    text = {
        "a.json": json.dumps(found, indent=1),
        "a.jsonl.gz": "".join(json.dumps(row) + "\n" for row in found),
    }.get(name, 'p,a\nrow 1,"x, ""y""\n"\nrow 2,z\n'.replace(",", "\t" if "tsv" in name else ","))
    num_read = 0
    for _ in range(200):
        raw = damaged(rng, gzip.compress(text.encode(), mtime=0) if name.endswith(".gz") else text.encode())
        source = write(tmp_path / name, raw)
        try:
            read = rows(source)
        except ConfigError as error:
            assert error.code == "C005" and name in str(error)
            continue
        num_read += 1
        if name == "a.json" and raw.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            assert read == json.loads(raw.decode("utf-8-sig"))
    assert num_read < 200
