"""The folder of checkpoints survives everything: crashes at any system call, full disks, damage, other jobs."""

import contextlib
import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from hocket.comm.alone import AloneCommunicator
from hocket.config import Config
from hocket.errors import CheckpointError, UsageError
from hocket.job.checkpoint import checkpoint_folder, save_load_resume, tensor_file
from hocket.job.checkpoint.checkpoint_folder import CheckpointFolder
from hocket.job.checkpoint.saver import Saver
from hocket.job.checkpoint.snapshot import Subjects
from hocket.job.checkpoint.tensor_file import Image, TensorFile
from hocket.job.worker import Worker
from hocket.launch.guardian import Guardian, Unfinished

CALLS = ("open", "write", "fsync", "ftruncate", "rename", "mkdir", "unlink", "rmdir", "close")


def save(folder: Path, value: float, keep: int = 1, width: int = 40, ledger: int | None = None) -> None:
    """A checkpoint of a model all of whose weights are ``value``."""
    model = nn.Linear(width, width)
    with torch.no_grad():
        model.weight.fill_(value)
    worker = Worker(Config(ledger=ledger), AloneCommunicator())
    saving = Saver(worker).save(folder, Subjects(model, None, None, None, None, {}), keep, patient=True)
    assert saving is not None
    saving.wait()


def read(folder: Path) -> float:
    path = checkpoint_folder.find(folder, lambda line: None)
    return float(TensorFile(path / "part-0.safetensors").read("model.weight").unique())


def in_child(work: Callable[[], None]) -> int:
    """Run ``work`` in a copy of this process; its exit status."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            os._exit(99)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def crash_at(number: int, folder: Path, ledger: int) -> None:
    """Save, and be killed at the ``number``-th system call, of a write when half of it is done."""
    count = 0

    def watched(name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == number:
                if name == "write":
                    with contextlib.suppress(OSError):  # past the page cache only whole blocks go
                        real(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, watched(name, getattr(os, name)))
    save(folder, 2.0, ledger=ledger)


def test_a_crash_at_any_system_call_leaves_a_good_checkpoint(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    number, values = 0, []
    while True:
        number += 1
        folder = tmp_path / str(number)
        assert in_child(lambda folder=folder: save(folder, 1.0)) == 0
        reader, ledger = os.pipe()
        status = in_child(lambda folder=folder, number=number, ledger=ledger: crash_at(number, folder, ledger))
        values.append(read(folder))
        os.close(ledger)
        with os.fdopen(reader, "rb") as told:
            unfinished = Unfinished()
            unfinished.follow(told.read())
        assert unfinished.remove() and {path.name[0] for path in folder.glob(".*-step-*")} == set()
        assert in_child(lambda folder=folder: save(folder, 3.0)) == 0
        assert read(folder) == 3.0
        assert sorted(p.name for p in folder.iterdir() if p.name != ".lock") == [
            checkpoint_folder.committed(folder)[-1].name
        ]
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert number > 20 and values[0] == 1.0 and values[-1] == 2.0
    assert values == sorted(values), "once the new one is there, it stays"


@pytest.mark.parametrize("descriptors", [0, 1100])  # select() refuses those from 1024 on
def test_what_a_worker_removed_when_it_was_killed_is_gone_when_the_job_is_over(
    tmp_path: Path, descriptors: int
) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < descriptors + 500:
        pytest.skip(f"the shell allows fewer than {descriptors + 500} open files")
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(descriptors)]
    guardian = Guardian()
    for file in files:
        os.close(file)
    hidden = tmp_path / ".000001-step-0.removed"

    def be_killed() -> None:
        shutil.rmtree = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        save(tmp_path, 2.0, ledger=guardian.ledger)

    try:
        assert in_child(lambda: save(tmp_path, 1.0)) == 0
        assert in_child(be_killed) == -signal.SIGKILL and hidden.exists()
    finally:
        guardian.dismiss()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "000002-step-0"] and read(tmp_path) == 2.0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with 256 KiB."""
    if os.geteuid() != 0:
        pytest.skip("a small file system can be mounted by root only")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mount is not allowed here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_is_told_and_the_last_good_one_stays(small_disk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = small_disk / "saved"
    save(folder, 1.0, width=150)
    with pytest.raises(CheckpointError, match="could not be written: No space left on device"):
        save(folder, 2.0, width=250)
    assert "No space left on device; training goes on" in capfd.readouterr().err
    assert read(folder) == 1.0
    assert sorted(p.name for p in folder.iterdir()) == [".lock", "000001-step-0"], "the rest was taken away"
    save(folder, 3.0, width=100)
    assert read(folder) == 3.0


def test_a_disk_that_stays_full_is_told_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    saver = Saver(Worker(Config(), AloneCommunicator()))
    subjects = Subjects(nn.Linear(2, 2), None, None, None, None, {})

    def fail(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for fails in (True, True, False, True):
        with pytest.MonkeyPatch.context() as patch:
            if fails:
                patch.setattr(checkpoint_folder, "write_file", fail)
            saving = saver.save(tmp_path, subjects, 1, patient=True)
            assert saving is not None
            saver.settle()
            assert bool(saving.error) == fails
    assert capfd.readouterr().err.count("No space left on device; training goes on") == 2


def craft(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a manifest as somebody does who knows its checksum."""
    manifest = json.loads((path / "checkpoint.json").read_text().partition("\n")[2])
    text = json.dumps(change(manifest))
    (path / "checkpoint.json").write_text(json.dumps({"crc32": zlib.crc32(text.encode())}) + "\n" + text + "\n")


CRAFTED: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda m: [m], "is not one of a checkpoint"),
    (lambda m: {**m, "format": "1"}, "is not one of a checkpoint"),
    (lambda m: {key: value for key, value in m.items() if key != "aliases"}, "is not one of a checkpoint"),
    (lambda m: {**m, "files": {"../x": {"nbytes": 1, "crc32": 1}}}, "is not one of a checkpoint"),
    (lambda m: {**m, "files": {"part-0.safetensors": 7}}, "is not one of a checkpoint"),
    (lambda m: {**m, "metrics": {"$strange": 1}}, "make no sense (KeyError: '$strange')"),
    (lambda m: {**m, "objects": {"model": 5}}, "make no sense (TypeError"),
    (lambda m: {**m, "objects": {"model": {"weight": {"$tensor": "x"}, "bias": 1}}}, "make no sense (KeyError"),
]


@pytest.mark.parametrize(("change", "words"), CRAFTED)
def test_a_crafted_manifest_is_an_error_that_names_it(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], words: str
) -> None:
    save(tmp_path, 1.0)
    (path,) = checkpoint_folder.committed(tmp_path)
    craft(path, change)
    worker = Worker(Config(), AloneCommunicator())
    with pytest.raises(CheckpointError) as raised:
        save_load_resume._load(worker, path, Subjects(nn.Linear(40, 40), None, None, None, None, {}))
    assert str(path) in str(raised.value) and words in str(raised.value)


def test_every_failing_call_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("write", "fsync", "ftruncate"):
        folder = tmp_path / name
        save(folder, 1.0)
        with monkeypatch.context() as patch:

            def fail(*_: Any) -> Any:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            patch.setattr(os, name, fail)
            with pytest.raises(CheckpointError, match="Input/output error"):
                save(folder, 2.0)
        assert read(folder) == 1.0


def damage(path: Path, how: str) -> None:
    part = path / "part-0.safetensors"
    if how == "truncated":
        os.truncate(part, part.stat().st_size - 5)
    elif how == "altered":
        data = bytearray(part.read_bytes())
        data[-9] ^= 1
        part.write_bytes(data)
    elif how == "part missing":
        part.unlink()
    elif how == "manifest missing":
        (path / "checkpoint.json").unlink()
    elif how == "manifest altered":
        text = (path / "checkpoint.json").read_text()
        (path / "checkpoint.json").write_text(text.replace('"step":0', '"step":9'))
    else:
        (path / "checkpoint.json").write_text("{")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("truncated", "bytes instead of"),
        ("altered", "part-0.safetensors was altered"),
        ("part missing", "part-0.safetensors is missing"),
        ("manifest missing", "checkpoint.json is missing"),
        ("manifest altered", "checkpoint.json was altered"),
        ("manifest nonsense", "checkpoint.json cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(tmp_path: Path, how: str, words: str) -> None:
    save(tmp_path, 1.0, keep=2)
    save(tmp_path, 2.0, keep=2)
    newest = checkpoint_folder.committed(tmp_path)[-1]
    damage(newest, how)
    said: list[str] = []
    assert checkpoint_folder.find(tmp_path, said.append).name == "000001-step-0"
    assert len(said) == 1 and str(newest) in said[0] and words in said[0]
    with pytest.raises(CheckpointError, match="is damaged"):
        checkpoint_folder.find(newest, said.append)
    damage(checkpoint_folder.committed(tmp_path)[0], how)
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints"):
        checkpoint_folder.find(tmp_path, said.append)


def test_the_last_few_are_kept_and_the_new_one_is_there_before_an_old_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, seen = Path.rename, []

    def watched(self: Path, target: Path) -> Path:
        result = rename(self, target)
        seen.append(len(checkpoint_folder.committed(tmp_path)))
        return result

    monkeypatch.setattr(Path, "rename", watched)
    for value in range(5):
        save(tmp_path, float(value), keep=2)
    assert [path.name for path in checkpoint_folder.committed(tmp_path)] == ["000004-step-0", "000005-step-0"]
    assert min(seen[1:]) >= 2


def test_a_second_job_is_refused(tmp_path: Path) -> None:
    first = CheckpointFolder(tmp_path)
    first.open()
    reader, writer = os.pipe()

    def second() -> None:
        try:
            CheckpointFolder(tmp_path).open()
        except CheckpointError as error:
            os.write(writer, str(error).encode())

    assert in_child(second) == 0
    os.close(writer)
    message = os.read(reader, 10_000).decode()
    os.close(reader)
    assert f"another job (process {os.getpid()} on" in message and "choose another folder" in message
    assert first._lock is not None
    os.close(first._lock)
    assert in_child(lambda: CheckpointFolder(tmp_path).open()) == 0


def test_the_next_worker_of_a_job_waits_until_the_last_one_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipes = [os.pipe(), os.pipe()]
    (ready, is_ready), (over, is_over) = pipes
    child = os.fork()
    if child == 0:
        CheckpointFolder(tmp_path, job="a").open(keep=True)
        os.write(is_ready, b"!")
        os.read(over, 1)
        os._exit(0)
    os.read(ready, 1)
    with pytest.raises(CheckpointError, match="another job"):
        CheckpointFolder(tmp_path, job="b").open()
    monkeypatch.setattr(checkpoint_folder.time, "sleep", lambda _: os.write(is_over, b"!"))
    CheckpointFolder(tmp_path, job="a").open()
    assert os.waitpid(child, 0)[1] == 0
    for descriptor in (*pipes[0], *pipes[1]):
        os.close(descriptor)


def test_two_jobs_without_locks_do_not_overwrite_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcntl.lockf", lambda *_: None)  # as on some network file systems
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    one, two = CheckpointFolder(tmp_path), CheckpointFolder(tmp_path)
    folders = [one.begin(7, "aa"), two.begin(7, "bb")]
    empty = {"size": 1, "step": 7, "batches": 7, "samples": 7, "steps": [], "warmups": [], "strategies": []}
    empty |= {"objects": {}, "loaders": {}, "aliases": {}}
    manifest = {name: json.dumps(value) for name, value in empty.items()}
    paths = [each.commit(folder, manifest, {}, keep=5) for each, folder in zip((one, two), folders, strict=True)]
    assert [path.name for path in paths] == ["000001-step-7", "000002-step-7"]
    assert [checkpoint_folder.inspect(path) for path in paths] == ["", ""]


def test_files_are_plain_safetensors(tmp_path: Path) -> None:
    tensors = {
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(3, 5).bfloat16(),
        "double": torch.randn(1000, 33, dtype=torch.float64).t(),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3),
        "numbers": torch.arange(5, dtype=torch.uint8),
    }
    image = Image(tensor_file.describe(tensors))
    image.fill(tensors.values())
    written = image.write(tmp_path / "file", '{"a": 1}')
    assert tensor_file.measure(tmp_path / "file") == written
    for name, tensor in safetensors.torch.load_file(tmp_path / "file").items():
        assert tensor.dtype == tensors[name].dtype and torch.equal(tensor, tensors[name])
    assert TensorFile(tmp_path / "file").metadata == '{"a": 1}'
    with pytest.raises(UsageError, match="which safetensors does not know"):
        tensor_file.check({"x": torch.zeros(1, dtype=torch.complex128)})
    with pytest.raises(UsageError, match="make it dense"):
        tensor_file.check({"x": torch.eye(2).to_sparse()})
