"""Random operations on the store and on a local directory, which must agree all along."""

import itertools
import shutil
import tempfile

import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mooncake_store.fs import MooncakeFileSystem

_numbers = itertools.count()
NAMES = st.sampled_from(["a", "b", "d/a", "d/b", "d/e/a", "ü x/1"])
DIRECTORIES = st.sampled_from(["", "d", "d/e", "ü x"])
SIZES = st.sampled_from([0, 1, 250, 251, 252, 1023, 1024, 1025, 5000])
NO_DIRECTORY = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class Agreement(RuleBasedStateMachine):
    """Directories of the model that became empty are removed: the store has none."""

    address = None

    def __init__(self):
        super().__init__()
        self.root = tempfile.mkdtemp()
        self.model = DirFileSystem(self.root, LocalFileSystem(auto_mkdir=True))
        url = f"mooncake://{self.address}/model-{next(_numbers)}"
        self.fs = MooncakeFileSystem(url, part_size="1KiB", skip_instance_cache=True)
        self.counter = 0

    def teardown(self):
        self.fs.rm("", recursive=True)
        self.fs.close()
        shutil.rmtree(self.root)

    def fresh(self, size):
        self.counter += 1
        return bytes((self.counter + at) & 0xFF for at in range(size))

    def both(self, call):
        """Run on both; both succeed or both find nothing."""
        outcomes = []
        for side in (self.model, self.fs):
            try:
                outcomes.append((True, call(side)))
            except NO_DIRECTORY:
                outcomes.append((False, None))
        assert outcomes[0] == outcomes[1]
        return outcomes[1][1]

    def prune(self):
        """Remove what became empty from the model."""
        for path, directories, files in list(self.model.walk("", topdown=False)):
            if path and not directories and not files:
                self.model.rmdir(path)
        for path in ("d/e", "d", "ü x"):
            if self.model.isdir(path) and not self.model.ls(path):
                self.model.rmdir(path)

    @rule(name=NAMES, size=SIZES)
    def pipe(self, name, size):
        data = self.fresh(size)
        self.both(lambda side: side.pipe_file(name, data))

    @rule(name=NAMES, sizes=st.lists(SIZES, max_size=4))
    def write(self, name, sizes):
        pieces = [self.fresh(size) for size in sizes]

        def write(side):
            with side.open(name, "wb") as file:
                for piece in pieces:
                    file.write(piece)

        self.both(write)

    @rule(name=NAMES)
    def remove(self, name):
        self.both(lambda side: side.rm_file(name))
        self.prune()

    @rule(one=NAMES, other=NAMES)
    def move(self, one, other):
        if one != other and self.model.isfile(one):
            self.both(lambda side: side.mv(one, other))
            self.prune()

    @rule(one=NAMES, other=NAMES)
    def copy(self, one, other):
        if one != other:
            self.both(lambda side: side.cp_file(one, other))
            self.prune()

    @rule(path=DIRECTORIES)
    def remove_tree(self, path):
        if path and self.model.exists(path):
            self.both(lambda side: side.rm(path, recursive=True))
            self.prune()

    @rule(name=NAMES, start=st.integers(-6000, 6000), end=st.integers(-6000, 6000) | st.none())
    def cat(self, name, start, end):
        if not self.fs.isfile(name):
            with pytest.raises(FileNotFoundError):
                self.fs.cat_file(name, start, end)
            return
        whole = self.model.cat_file(name)
        assert self.fs.cat_file(name, start, end) == whole[start:end]

    @rule(name=NAMES, reads=st.lists(st.tuples(st.integers(0, 5500), st.integers(0, 2000))))
    def seek_and_read(self, name, reads):
        def read(side):
            with side.open(name, "rb") as file:
                out = []
                for offset, length in reads:
                    file.seek(offset)
                    out.append(file.read(length))
                return out

        self.both(read)

    @rule(path=DIRECTORIES)
    def listings_agree(self, path):
        def look(side):
            entries = side.ls(path, detail=True)
            return sorted(
                (e["name"], e["type"], e["type"] == "file" and e["size"]) for e in entries
            )

        self.both(look)

    @invariant()
    def all_files_agree(self):
        names = self.fs.find("")
        assert names == sorted(self.model.find(""))
        if names:
            assert self.fs.cat(names) == {name: self.model.cat_file(name) for name in names}


def test_the_store_agrees_with_a_local_directory(cluster):
    Agreement.address = cluster.address
    case = Agreement.TestCase()
    case.settings = settings(max_examples=15, stateful_step_count=30)
    case.runTest()
