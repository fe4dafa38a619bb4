"""Text from docstrings, and the disk cache under it."""

import ast
import json

import pytest

from memlab.data import disk, text
from memlab.data.text import Doc

SOURCE = '''
"""A module about nothing, with a docstring that is long enough."""

class Box(Base):
    """Holds things until somebody asks for them, then gives them out."""

    def take(self, n: int = 1) -> list:
        """Take n things out of the box, the newest of them first."""

    def put(self): "short"

async def fetch(url, *, retries=3):
    r"""Fetch with a \\d in the docstring, which is escaped well enough."""
'''


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "user_cache_dir", lambda name: str(tmp_path / name))
    return tmp_path / "memlab" / "data"


def test_docs_have_names_signatures_and_clean_text(tmp_path):
    (tmp_path / "box.py").write_text(SOURCE)
    docs = list(text._parse(tmp_path / "box.py", "box"))
    assert [(doc.name, doc.signature) for doc in docs] == [
        ("box", ""),
        ("box.Box", "class Box(Base)"),
        ("box.Box.take", "def take(self, n: int=1) -> list"),
        ("box.fetch", "def fetch(url, *, retries=3)"),
    ]
    assert docs[1].text == "Holds things until somebody asks for them, then gives them out."


def test_files_that_do_not_parse_are_skipped(tmp_path):
    (tmp_path / "bad.py").write_text("def (:")
    assert list(text._parse(tmp_path / "bad.py", "bad")) == []
    assert list(text._parse(tmp_path / "none.py", "none")) == []


def test_invalid_escapes_in_others_sources_do_not_warn(tmp_path):
    (tmp_path / "esc.py").write_text(
        '"""A docstring with a bad \\d escape, as many libraries have."""'
    )
    assert len(list(text._parse(tmp_path / "esc.py", "esc"))) == 1  # warnings are errors here


def test_test_folders_are_left_out(tmp_path):
    (tmp_path / "pkg" / "tests").mkdir(parents=True)
    (tmp_path / "pkg" / "b.py").touch()
    (tmp_path / "pkg" / "a.py").touch()
    (tmp_path / "pkg" / "tests" / "c.py").touch()
    found = [path.name for path in text._files(tmp_path, ("pkg", "missing", "missing.py"))]
    assert found == ["a.py", "b.py"]


def test_rows_of_each_kind():
    docs = [
        Doc("m", "", "about the module"),
        *(Doc(f"m.C.f{i}", f"def f{i}(self)", f"text {i}") for i in range(5)),
        Doc("m.g", "def g()", "text g"),
    ]
    assert text.plain_text(docs)[0] == "about the module"
    pairs = text.prompt_completion(docs)
    assert pairs[0] == {"prompt": "def f0(self):\n", "completion": "text 0"}
    assert len(pairs) == 6  # the module has no signature
    chats = [row["messages"] for row in text.chat(docs)]
    assert [sum(m["role"] == "assistant" for m in chat) for chat in chats] == [4, 1, 1]
    assert [m["role"] for m in chats[2]] == ["system", "user", "assistant"]
    assert chats[2][2]["content"] == "text g"


def test_rows_that_compare_judge_and_ask():
    docs = [Doc("m", "", "about")] + [Doc(f"m.{c}", f"def {c}()", f"text {c}") for c in "abc"]
    pairs = text.preference(docs)
    assert pairs == [
        {"prompt": "def a():\n", "chosen": "text a", "rejected": "text b"},
        {"prompt": "def b():\n", "chosen": "text b", "rejected": "text c"},
        {"prompt": "def c():\n", "chosen": "text c", "rejected": "text a"},
    ]
    judged = text.unpaired_preference(docs)
    assert [tuple(row.values()) for row in judged] == [
        ("def a():\n", "text a", True),
        ("def b():\n", "text c", False),
        ("def c():\n", "text c", True),
    ]
    assert text.prompt_only(docs) == [{"prompt": row["prompt"]} for row in pairs]
    with pytest.raises(ValueError, match="1 docs with a signature"):
        text.preference(docs[:2])
    assert text.conversational(judged)[1] == {
        "prompt": [{"role": "user", "content": "def b():\n"}],
        "completion": [{"role": "assistant", "content": "text c"}],
        "label": False,
    }
    (_, pair, _) = text.conversational(pairs)
    assert [message["role"] for side in pair.values() for message in side] == [
        "user",
        "assistant",
        "assistant",
    ]


def test_installed_packages_give_prose_once_each():
    docs = text.docstrings()
    assert docs is text.docstrings()
    assert len(docs) > 3000
    assert len({doc.text for doc in docs}) == len(docs)
    names = {doc.name for doc in docs}
    assert {"torch.nn.modules.linear.Linear", "json", "numpy.linalg._linalg.norm"} <= names
    for doc in docs[::200]:
        if doc.signature:
            ast.parse(f"{doc.signature}: ...")


def test_cache_is_used_and_survives_damage(cache):
    assert disk.cached_json("x.json", lambda: [1]) == [1]
    assert json.loads((cache / "x.json").read_text()) == [1]
    assert disk.cached_json("x.json", lambda: [2]) == [1]
    (cache / "x.json").write_text("[1, ")
    assert disk.cached_json("x.json", lambda: [3]) == [3]
    assert disk.cached_json("x.json", lambda: [4]) == [3]
    assert [path.name for path in cache.iterdir()] == ["x.json"]  # no temporary file is left


def test_unwritable_cache_only_means_no_cache(cache):
    cache.parent.parent.joinpath("memlab").write_text("a file where the folder should be")
    assert disk.cached_json("x.json", lambda: [1]) == [1]
    assert disk.cached_json("x.json", lambda: [2]) == [2]


def test_reading_skips_what_is_missing_and_repeated(tmp_path, monkeypatch):
    (tmp_path / "b.py").write_text(SOURCE)
    (tmp_path / "c.py").write_text(SOURCE)  # the same texts under other names
    (tmp_path / "d.py").write_text('"""A docstring of its own, which no other file has."""')
    folders = {"one": tmp_path, "absent": None}
    monkeypatch.setattr(text, "SOURCES", {"absent": (".",), "one": ("d.py", "gone", ".")})
    monkeypatch.setattr(text, "_folder", folders.__getitem__)
    names = [doc.name for doc in text._read_all()]
    assert names == ["one.d", "one.b", "one.b.Box", "one.b.Box.take", "one.b.fetch"]
    assert set(text.source_versions()) == {"python"}
