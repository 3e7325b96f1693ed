"""A checkpoint that somebody else wrote: nothing in it runs, what does not fit is refused by name, old ones load.

The checkpoints in `checkpoints.tar.xz` were written by fxamp of before, when `.metadata` was unpickled: one in a folder
by one process with AdamW, one by one with SGD, one by two ranks with a sharded model, one by two with replicas. The
file `step.pt` in each is the state that the fxamp of then had when it had loaded the rest.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import encodings.cp437  # noqa: F401  # which the first archive imports
import io
import os
import pickle
import shutil
import struct
import sys
import tarfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import SequentialLR, StepLR

import fxamp

ARCHIVE = Path(__file__).with_name("checkpoints.tar.xz")
FOLDERS = ["adamw_alone", "adamw_sharded", "sgd_alone", "sgd_replicas"]
X = torch.arange(12.0).view(3, 4) / 12
METADATA = "torch.distributed.checkpoint.metadata"


def made(folder: str) -> fxamp.TrainStep:
    torch.manual_seed(0)
    view = fxamp.convert(nn.Sequential(nn.Linear(4, 2)), policy="O1,dtype=fp16")
    parameters, adamw = view.parameters(), folder.startswith("adamw")
    optimizer = AdamW(parameters, lr=0.01) if adamw else SGD(parameters, lr=0.1, momentum=0.9)
    scaler = fxamp.LossScaler(init_scale=8.0, growth_interval=3)
    return fxamp.TrainStep(
        view, lambda y: y.square().mean(), optimizer, scaler=scaler, scheduler=StepLR(optimizer, 2, 0.5)
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(ARCHIVE) as archive:
        for member in archive.getmembers():  # without `filter`, which the oldest Python does not know
            if member.isfile():
                file = folder / member.name
                file.parent.mkdir(exist_ok=True)
                content = archive.extractfile(member)
                assert content is not None
                file.write_bytes(content.read())
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """Return a copy of the checkpoint of two ranks, which has every kind of file."""
    return Path(shutil.copytree(written / "adamw_sharded", tmp_path / "c"))


@pytest.fixture(scope="module")
def step(written: Path) -> fxamp.TrainStep:
    step = made("adamw")
    step(X)
    fxamp.load_checkpoint(step, written / "adamw_sharded")  # what torch imports at a first load is there then
    step.load(written / "adamw_sharded" / "step.pt")
    step(X)
    return step


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


# ---------------------------------------------------------------------------------------------- old ones load


@pytest.mark.parametrize("name", FOLDERS)
def test_a_checkpoint_of_before_loads_bit_for_bit(name: str, written: Path) -> None:
    expected, got, single = made(name), made(name), made(name)
    torch.manual_seed(5)
    expected.load_state_dict(torch.load(written / name / "step.pt", weights_only=True))
    state = copy.deepcopy(expected.state_dict())
    assert state["windows"] == 4
    torch.manual_seed(6)
    single.load(written / name / "step.pt")
    assert same(copy.deepcopy(single.state_dict()), state)
    torch.manual_seed(7)
    fxamp.load_checkpoint(got, written / name)
    found = copy.deepcopy(got.state_dict())
    if "alone" not in name:  # of another number of ranks, whose random numbers are left alone
        del found["rng"], state["rng"]
    assert same(found, state)
    assert torch.equal(got(X).loss, expected(X).loss)


def test_metadata_of_other_releases_load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, got = made("adamw"), made("adamw")
    fxamp.load_checkpoint(expected, folder)
    fields: Any = TensorProperties.__getstate__
    members = type(fields(TensorProperties())[3])
    with monkeypatch.context() as patch:
        # Torch 2.15 adds strides; Python 3.11.0 names members of enumerations; 3.13 has paths in a module of their own.
        patch.setattr(TensorProperties, "__getstate__", lambda self: (*fields(self)[:5], (4, 1)))
        patch.setattr(members, "__reduce_ex__", lambda self, _: (getattr, (members, self.name)))
        lie(lambda metadata: None)(folder)
    file = folder / ".metadata"
    before = file.read_bytes()
    assert text("getattr") in before
    after = before.replace(text("pathlib"), text("pathlib._local"))
    assert after != before
    file.write_bytes(after)
    fxamp.load_checkpoint(got, folder)
    assert same(got.state_dict(), expected.state_dict())


# ---------------------------------------------------------------------------------------------- nothing runs

events: list[tuple[str, Any]] | None = None
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND
RUNS = (
    "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.", "pickle.find_class", "exec",
    "import", "ctypes.", "socket.", "shutil.", "os.remove", "os.rename", "os.mkdir", "os.symlink", "webbrowser.",
    "os.startfile", "marshal.", "code.__new__", "function.__new__",
)  # fmt: skip


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if events is None:
        return
    if event.startswith(RUNS) or (event == "open" and args[2] & WRITES):
        events.append((event, args[:1]))


@pytest.fixture(scope="module", autouse=True)
def _audited() -> None:
    sys.addaudithook(_audit)


@contextlib.contextmanager
def watched() -> Iterator[list[tuple[str, Any]]]:
    global events
    seen: list[tuple[str, Any]] = []
    events = seen
    try:
        yield seen
    finally:
        events = None


def name(module: str, attribute: str) -> bytes:
    """Return the opcodes that import something, of protocol 4."""
    return b"".join(b"\x8c" + bytes([len(t)]) + t.encode() for t in (module, attribute)) + b"\x93"


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def call(module: str, attribute: str, *args: bytes) -> bytes:
    return b"\x80\x04" + name(module, attribute) + b"(" + b"".join(args) + b"tR."


TOUCH = "touch ran"
NESTED = call("posix", "system", text(TOUCH))
CODE = f"__import__('os').system('{TOUCH}')"
METHOD = name(METADATA, "Metadata")
EXTENSION = 200


def binary(data: bytes) -> bytes:
    return b"C" + bytes([len(data)]) + data


# Pickles that do something when they are unpickled.
LIVE: dict[str, bytes] = {
    "os.system": call("os", "system", text(TOUCH)),
    "posix.system": NESTED,
    "protocol 0": b"cos\nsystem\n(S'touch ran'\ntR.",
    "protocol 2": b"\x80\x02cos\nsystem\nX\x09\x00\x00\x00touch ran\x85R.",
    "INST": b"(S'touch ran'\nios\nsystem\n.",
    "OBJ": b"(cos\nsystem\nS'touch ran'\no.",
    "eval": call("builtins", "eval", text(CODE)),
    "exec": call("builtins", "exec", text(CODE)),
    "__builtin__": b"c__builtin__\neval\n(S\"" + CODE.encode() + b'"\ntR.',
    "__import__": call("builtins", "__import__", text("hostile_module")),
    "import_module": call("importlib", "import_module", text("hostile_module")),
    "a name of a module that runs when imported": b"\x80\x04" + name("hostile_module", "value") + b".",
    "a module that runs, protocol 0": b"chostile_module\nvalue\n.",
    "a dotted name": call("os", "path.os.system", text(TOUCH)),
    "a dotted name of torch": call("torch", "serialization.os.system", text(TOUCH)),
    "a dotted name below an allowed module": call(METADATA, "os.system", text(TOUCH)),
    "a method of an allowed class": call("pathlib", "PosixPath.touch", call("pathlib", "PosixPath", text("ran"))[2:-1]),
    "getattr": b"\x80\x04"
    + name("builtins", "getattr")
    + call("builtins", "__import__", text("os"))[2:-1]
    + text("system")
    + b"\x86R"
    + text(TOUCH)
    + b"\x85R.",
    "functools.partial": call("functools", "partial", name("os", "system"), text(TOUCH))[:-1] + b")R.",
    "operator.methodcaller": call("operator", "methodcaller", text("system"), text(TOUCH))[:-1]
    + call("builtins", "__import__", text("os"))[2:-1]
    + b"\x85R.",
    "map": call(
        "collections", "deque", call("builtins", "map", name("os", "system"), b"]" + text(TOUCH) + b"a")[2:-1]
    ),
    "pickle.loads": call("pickle", "loads", binary(NESTED)),
    "torch.load": call(
        "torch.serialization", "load", call("_io", "BytesIO", binary(saved([])[:4]))[2:-1], b"N", name("pickle", "x")
    ).replace(name("pickle", "x"), name("hostile_module", "value")),
    "_load_from_bytes": call("torch.storage", "_load_from_bytes", b"B" + struct.pack("<I", 4) + b"abcd")[:-1]
    + name("os", "system")
    + text(TOUCH)
    + b"\x85R.",
    "subprocess": call("subprocess", "getoutput", text(TOUCH)),
    "runpy": call("runpy", "run_path", text("hostile_module.py")),
    "open": call("io", "open", text("ran"), text("w")),
    "marshal": call("marshal", "loads", binary(b"N")),
    "BUILD": b"\x80\x04" + METHOD + b")\x81" + call("os", "system", text(TOUCH))[2:-1] + b"b.",
    "a key": b"\x80\x04}" + call("os", "system", text(TOUCH))[2:-1] + b"Ns.",
    "an item": b"\x80\x04]" + call("os", "system", text(TOUCH))[2:-1] + b"a.",
    "behind what is popped": b"\x80\x04" + call("os", "system", text(TOUCH))[2:-1] + b"0N.",
    "NEWOBJ_EX": b"\x80\x04" + name("subprocess", "Popen") + text(TOUCH) + b"\x85}" + text("shell") + b"\x88s\x92.",
    "an extension of copyreg": b"\x80\x02\x82" + bytes([EXTENSION]) + b"X\x09\x00\x00\x00touch ran\x85R.",
    "copyreg": call("copyreg", "_reconstructor", name("hostile_module", "value"), name("builtins", "object"), b"N"),
    "ctypes": call("ctypes", "CDLL", b"N"),
}  # fmt: skip
# Others, which do harm in another way, or try to: they write to classes, claim sizes, or are nested too deep.
OTHER: dict[str, bytes] = {
    "BUILD on a class": b"\x80\x04" + METHOD + b"N}" + text("__init__") + name("torch", "Size") + b"s\x86b.",
    "BUILD twice": b"\x80\x04" + METHOD + b")\x81}b}b.",
    "__setstate__": b"\x80\x04" + name(METADATA, "TensorProperties") + b")\x81" + b"(NNNNNtb.",
    "a member of an enumeration": call(
        "builtins", "getattr", name(METADATA, "_MEM_FORMAT_ENCODING"), text("__class__")
    ),
    "getattr of a class": call("builtins", "getattr", METHOD, text("__init__")),
    "PERSID": b"P1\n.",
    "BINPERSID": b"\x80\x04" + text("x") + b"Q.",
    "a huge place in the memo": b"\x80\x04Nr\xff\xff\xff\xff.",
    "huge bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"abc.",
    "huge text": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"abc.",
    "a frame without an end": b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.",
    "deep tuples": b"\x80\x04}N" + b"\x85" * 200_000 + b"Ns.",
    "a list in itself": b"\x80\x04]\x94h\x00a.",
    "no end": b"\x80\x04]",
    "an empty stack": b"\x80\x04" + b"0" * 9 + b".",
    "a mark that is not there": b"\x80\x04t.",
    "protocol 9": b"\x80\x09N.",
    "None": b"\x80\x04N.",
    "an empty file": b"",
    "plain text": b"this is not a checkpoint\n" * 40,
    "zeros": bytes(3000),
    "an archive's first bytes": b"PK\x03\x04",
}
PICKLES = {**LIVE, **OTHER}


def packed(pickled: bytes, compression: int = zipfile.ZIP_STORED, **more: bytes) -> bytes:
    """Return an archive as `torch.save` writes it."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for entry, content in {"data.pkl": pickled, "byteorder": b"little", "version": b"3\n", **more}.items():
            archive.writestr(f"archive/{entry}", content)
    return file.getvalue()


def scripted() -> bytes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file = io.BytesIO()
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), file)
    return file.getvalue()


def claimed() -> bytes:
    """Return an archive of which a record says that it has a terabyte."""
    content = bytearray(saved(torch.zeros(3)))
    at = content.rindex(b"PK\x01\x02")
    content[at + 24 : at + 28] = struct.pack("<I", 0xFFFFFFF0)
    return bytes(content)


def tarred() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for entry in ("storages", "tensors", "pickle"):
            info = tarfile.TarInfo(entry)
            info.size = len(NESTED)
            archive.addfile(info, io.BytesIO(NESTED))
    return file.getvalue()


def legacy() -> bytes:
    file = io.BytesIO()
    torch.save({"a": torch.zeros(2)}, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


MESH = b"\x80\x02ctorch.distributed.device_mesh\nDeviceMesh\n"
# Of these `.metadata` refuses all, since none is a pickle.
ARCHIVES: dict[str, Callable[[], bytes]] = {
    "TorchScript": scripted,
    "a bomb": lambda: packed(b"\x80\x02N.", zipfile.ZIP_DEFLATED, **{"data/0": bytes(50 << 20)}),
    "a claim": claimed,
    "a storage larger than its record": lambda: saved(torch.zeros(4)).replace(b"K\x04t", b"K\xfft"),
    "a tensor without storage": lambda: saved(torch.zeros(4, device="meta")),
    "legacy tar": tarred,
    "cut short": lambda: saved(torch.arange(1000))[:4000],
    "without its end": lambda: saved(torch.arange(1000))[:-1],
    "without data": lambda: packed(b""),
    "another tensor": lambda: saved(torch.zeros(7)),
    "a list": lambda: saved([1, 2]),
    "a module": lambda: saved(nn.Linear(2, 2)),
    # Torch allows these by itself, and to call them is to start a process group, which waits for others.
    "a mesh": lambda: packed(MESH + b"X\x03\0\0\0cpu]K\0a\x86R."),
    "a mesh, called by torch": lambda: packed(
        b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n(" + MESH[2:] + b"ctorch\nTensor\nX\x03\0\0\0cpu]K\0a\x86}tR."
    ),
    "a NumPy array": lambda: saved(np.zeros(2)),
}


def forge(folder: Path, key: str, content: bytes | None = None, **fields: Any) -> str:
    """Let a part of a checkpoint be other content, or its place another; return the name of its shard."""
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    index = next(index for index in metadata.storage_data if index.fqn == key)
    info = metadata.storage_data[index]
    if content is not None:
        shard = folder / info.relative_path
        before = shard.read_bytes()
        shard.write_bytes(before + content)
        fields = {"offset": len(before), "length": len(content)}
    shard_name: str = info.relative_path
    vars(info).update(fields)
    file.write_bytes(pickle.dumps(metadata))
    return shard_name


def in_second_shard(folder: Path) -> str:
    metadata = FileSystemReader(folder).read_metadata()
    named = (index.fqn for index, info in metadata.storage_data.items() if info.relative_path.startswith("__1"))
    return next(key for key in named if ".0.weight" in key)


def refused(step: fxamp.TrainStep, path: Path, culprit: Path) -> str:
    """Load a checkpoint or a state, hold that it is refused by name and that nothing ran and changed; say why."""
    before = copy.deepcopy(step.state_dict())
    window, view = step.opened, step.model
    load = fxamp.TrainStep.load if path.suffix == ".pt" else fxamp.load_checkpoint
    with watched() as seen, pytest.raises(fxamp.PolicyError) as error:
        load(step, path)
    assert seen == []
    assert not Path("ran").exists()
    assert str(culprit.parent) in str(error.value)
    assert culprit.name in str(error.value)
    assert same(step.state_dict(), before)
    assert (step.opened, step.model) == (window, view)
    return str(error.value)


@pytest.fixture
def _hostile_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "hostile_module.py").write_text("open('ran', 'w').close()\nvalue = object\n")
    copyreg.add_extension("os", "system", EXTENSION)
    yield
    copyreg.remove_extension("os", "system", EXTENSION)
    sys.modules.pop("hostile_module", None)


@pytest.mark.usefixtures("_hostile_module")
@pytest.mark.parametrize("attack", LIVE)
def test_what_is_watched_sees_what_a_pickle_runs(attack: str) -> None:
    with watched() as seen, contextlib.suppress(Exception):
        getattr(pickle.loads(LIVE[attack]), "close", int)()
    assert seen


@pytest.mark.usefixtures("_hostile_module")
@pytest.mark.parametrize("attack", [*PICKLES, *ARCHIVES])
def test_nothing_runs_in_any_file(attack: str, step: fxamp.TrainStep, folder: Path) -> None:
    whole = PICKLES[attack] if attack in PICKLES else ARCHIVES[attack]()
    part = packed(whole) if attack in PICKLES else whole
    honest = {file.name: file.read_bytes() for file in folder.iterdir()}
    for file in honest:
        for content in {whole, part} if file == "step.pt" else {whole}:
            (folder / file).write_bytes(content)
            refused(step, folder / file if file == "step.pt" else folder, folder / file)
        (folder / file).write_bytes(honest[file])
    for key in ("course", "optimizer.0.0.weight.exp_avg", in_second_shard(folder)):
        shard = forge(folder, key, part)
        refused(step, folder, folder / shard)
        for file, before in honest.items():
            (folder / file).write_bytes(before)


@pytest.mark.usefixtures("_hostile_module")
def test_nothing_runs_where_torch_is_asked_to_run_what_is_in_files(
    step: fxamp.TrainStep, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    content = packed(LIVE["os.system"])
    with (
        watched() as seen,
        pytest.warns(UserWarning, match="FORCE_NO_WEIGHTS_ONLY_LOAD"),
        contextlib.suppress(Exception),
    ):
        torch.load(io.BytesIO(content))
    assert seen
    Path("ran").unlink()
    (folder / "step.pt").write_bytes(content)
    refused(step, folder / "step.pt", folder / "step.pt")
    refused(step, folder, folder / forge(folder, "model.0.weight", content))
    refused(step, folder, folder / forge(folder, "course", content))


# ---------------------------------------------------------------------------------------------- metadata that lie


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"relative_path": "../other/__0_0.distcp"}, "not a name that torch gives"),
        ({"relative_path": "/etc/passwd"}, "not a name that torch gives"),
        ({"relative_path": "__0_0.distcp/../../x"}, "not a name that torch gives"),
        ({"relative_path": "__0_0.distcp\n"}, "not a name that torch gives"),
        ({"relative_path": "step.pt"}, "not a name that torch gives"),
        ({"relative_path": 7}, "damaged"),
        ({"offset": -1}, "where sizes should be"),
        ({"offset": 1 << 40}, "cut short"),
        ({"length": 1 << 61}, "cut short"),
        ({"length": 1.5}, "opcode BINFLOAT"),
        ({"length": True}, "where sizes should be"),
        ({"length": 10}, "larger than its place"),
        ({"transform_descriptors": ["zstd"]}, "compressed"),
    ],
    ids=str,
)
def test_a_place_that_no_shard_has_is_refused(
    fields: dict[str, Any], reason: str, step: fxamp.TrainStep, folder: Path
) -> None:
    shutil.copytree(folder, folder.parent / "other")
    forge(folder, "model.0.weight", **fields)
    assert reason in refused(step, folder, folder / ".metadata")


def lie(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        change(metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return write


def of_state(metadata: Any) -> Any:
    return metadata.state_dict_metadata["optimizer.0.0.weight.exp_avg"]


LIES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a size": (lambda m: setattr(of_state(m), "size", torch.Size([1 << 40, 1 << 20])), "do not fill it"),
    "a size and its parts": (
        lambda m: [vars(of_state(m)).update(size=torch.Size([1 << 50, 4])),
                   vars(of_state(m).chunks[-1]).update(sizes=torch.Size([1 << 50, 4]))],
        "larger than its place",
    ),
    "a part outside": (lambda m: setattr(of_state(m).chunks[0], "sizes", torch.Size([9, 4])), "outside of it"),
    "a part is missing": (lambda m: of_state(m).chunks.pop(), "places for"),
    "a part named often": (lambda m: setattr(of_state(m), "chunks", of_state(m).chunks * 1000), "places for"),
    "a place is missing": (lambda m: m.storage_data.popitem(), "places for"),
    "all in one place": (
        lambda m: [vars(info).update(offset=0, length=30_000) for info in m.storage_data.values()], "cut short"
    ),
    "another dtype": (lambda m: setattr(of_state(m).properties, "dtype", torch.float16), "should be at byte"),
    "bytes for a tensor": (
        lambda m: m.state_dict_metadata.update({"model.0.bias": m.state_dict_metadata["course"]}), "places for"
    ),
    "the course is a tensor": (
        lambda m: m.state_dict_metadata.update(course=m.state_dict_metadata["model.0.bias"]), "places for"
    ),
    "the course is not there": (
        lambda m: m.storage_data.update(
            {MetadataIndex("other"): m.storage_data.pop(next(i for i in m.storage_data if i.fqn == "course"))}
        ), "damaged",
    ),
    "another class": (lambda m: m.state_dict_metadata.update({"x": torch.Size([1])}), "other than tensors"),
    "no course": (lambda m: [m.state_dict_metadata.pop("course"),
                             m.storage_data.pop(next(i for i in m.storage_data if i.fqn == "course"))],
                  "does not hold a checkpoint"),
}  # fmt: skip


@pytest.mark.parametrize("what", LIES)
def test_metadata_that_do_not_go_with_the_shards_are_refused(what: str, step: fxamp.TrainStep, folder: Path) -> None:
    change, reason = LIES[what]
    lie(change)(folder)
    assert reason in refused(step, folder, folder)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pipes that are files")
@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", "__1_0.distcp", "step.pt"])
def test_what_has_no_end_is_not_read_and_links_are(file: str, step: fxamp.TrainStep, folder: Path) -> None:
    path = folder / "step.pt" if file == "step.pt" else folder
    honest = (folder / file).rename(folder.parent / "honest")
    os.mkfifo(folder / file)
    assert "is not a file" in refused(step, path, folder / file)
    (folder / file).unlink()
    (folder / file).symlink_to("/dev/zero")
    assert "is not a file" in refused(step, path, folder / file)
    (folder / file).unlink()
    (folder / file).symlink_to(honest)  # as caches of downloads have them
    again = made("adamw")
    again.load(path) if path.suffix else fxamp.load_checkpoint(again, path)
    assert again.windows == 4


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", "__1_0.distcp"])
def test_a_checkpoint_that_lacks_a_file_says_which(file: str, step: fxamp.TrainStep, folder: Path) -> None:
    (folder / file).unlink()
    before = copy.deepcopy(step.state_dict())
    with pytest.raises(FileNotFoundError, match=file):
        fxamp.load_checkpoint(step, folder)
    assert same(step.state_dict(), before)


# ------------------------------------------------------------------------- plain values that are no state of a step

UNREAD = {"given_scale", "losses", "reference", "weighted", "kept", "kept_share", "position"}  # between two windows
EMPTY = {"switches", "switched_plan", "beside", "ema", "states"}  # of this step, and another empty value is as good
OTHERS = pytest.mark.parametrize("value", ["x", None, -1, [], {}, [[0]], torch.zeros(2)], ids=repr)


def is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, list | dict) and not value)


@OTHERS
def test_a_state_of_other_values_is_refused_and_changes_nothing(
    value: Any, step: fxamp.TrainStep, written: Path, tmp_path: Path
) -> None:
    state = torch.load(written / "adamw_sharded" / "step.pt", weights_only=True)
    file = tmp_path / "step.pt"
    for key in state.keys() - UNREAD - (EMPTY if is_empty(value) else set()):
        torch.save({**state, key: value}, file)
        refused(step, file, file)
    if value is None or not is_empty(value):
        torch.save({**state, "position": 1, "losses": value}, file)
        refused(step, file, file)
    torch.save(value, file)
    refused(step, file, file)


@OTHERS
def test_a_course_of_other_values_is_refused_and_changes_nothing(
    value: Any, step: fxamp.TrainStep, folder: Path
) -> None:
    begin, end = place_of_course(folder)
    (course,) = torch.load(io.BytesIO((folder / "__0_0.distcp").read_bytes()[begin:end]), weights_only=True)
    honest = {file.name: file.read_bytes() for file in folder.iterdir()}
    for key in course.keys() - (EMPTY if is_empty(value) else set()):
        # The random states are those of as many ranks as there are.
        forge(folder, "course", saved(({**course, key: [value] if key == "random" else value},)))
        refused(step, folder, folder)
        for file, before in honest.items():
            (folder / file).write_bytes(before)


def place_of_course(folder: Path) -> tuple[int, int]:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    info = next(info for index, info in metadata.storage_data.items() if index.fqn == "course")
    return info.offset, info.offset + info.length


def test_an_error_shows_no_control_characters_of_a_file(step: fxamp.TrainStep, folder: Path) -> None:
    escape = "\x1b]0;x\x07"
    (folder / "step.pt").write_bytes(packed(f"\x80\x02c{escape}\nname\n.".encode("latin1")))
    (folder / ".metadata").write_bytes(b"\x80\x04" + name(escape, "name") + b".")
    for path, file in ((folder / "step.pt", "step.pt"), (folder, ".metadata")):
        assert "\x1b" not in refused(step, path, folder / file)


def test_a_part_that_does_not_fit_leaves_schedulers_within_a_scheduler_as_they_were(tmp_path: Path) -> None:
    def sequence() -> fxamp.TrainStep:
        model = nn.Linear(4, 2)
        optimizer = SGD(model.parameters(), lr=0.1)
        parts: Any = [StepLR(optimizer, 1, 0.5), StepLR(optimizer, 3, 0.1)]
        scheduler = SequentialLR(optimizer, parts, [5])
        return fxamp.TrainStep(model, lambda y: y.square().mean(), optimizer, scheduler=scheduler)

    step, other = sequence(), sequence()
    step(X)
    for _ in range(3):
        other(X)
    torch.save({**other.state_dict(), "rng": {"cpu": 3}}, tmp_path / "step.pt")
    refused(step, tmp_path / "step.pt", tmp_path / "step.pt")
    step.load_state_dict(other.state_dict())
    assert same(step.state_dict(), other.state_dict())


# ---------------------------------------------------------------------------------------------- what a user allows


class Schedule:
    """What an optimizer of one's own may keep in its groups."""

    def __init__(self) -> None:
        self.begin = 3


def test_an_object_in_the_state_is_refused_when_saved_unless_the_user_allows_its_class(tmp_path: Path) -> None:
    step = made("sgd")
    step.optimizers[0].param_groups[0]["schedule"] = Schedule()
    with pytest.raises(fxamp.PolicyError, match=r"could not be loaded again: it names .*\.Schedule.*add_safe_globals"):
        fxamp.save_checkpoint(step, tmp_path / "c")
    assert not (tmp_path / "c").exists()
    with torch.serialization.safe_globals([Schedule]):
        fxamp.save_checkpoint(step, tmp_path / "c")
        fxamp.load_checkpoint(step, tmp_path / "c")
    assert step.optimizers[0].param_groups[0]["schedule"].begin == 3
    with pytest.raises(fxamp.PolicyError, match=r"__0_0\.distcp' cannot be loaded: it names .*\.Schedule"):
        fxamp.load_checkpoint(step, tmp_path / "c")
