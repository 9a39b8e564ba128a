import pytest

from staleflow.training.checkpoints import MANIFEST, is_whole, newest_whole, write_checkpoint


def writer(text="weights", extra=()):
    def write(folder):
        (folder / "model.bin").write_text(text)
        (folder / "state").mkdir()
        (folder / "state" / "optimizer.bin").write_text("moments")
        for name in extra:
            (folder / name).write_text(name)

    return write


def names(root):
    return sorted(path.name for path in root.iterdir())


def test_the_newest_whole_checkpoint_is_found_by_number(tmp_path):
    assert newest_whole(tmp_path / "nowhere") is None
    for step in (9, 10):
        write_checkpoint(tmp_path, step, writer(), keep=5)
    assert newest_whole(tmp_path) == (10, tmp_path / "step_10")
    assert (tmp_path / "step_10" / "state" / "optimizer.bin").read_text() == "moments"


def cut_a_file(folder):
    (folder / "model.bin").write_text("weigh")


def change_a_file(folder):
    (folder / "model.bin").write_text("WEIGHTS")


def remove_a_file(folder):
    (folder / "state" / "optimizer.bin").unlink()


def remove_the_manifest(folder):
    (folder / MANIFEST).unlink()


def cut_the_manifest(folder):
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text[: len(text) // 2])


def empty_the_manifest(folder):
    (folder / MANIFEST).write_text("[]")


@pytest.mark.parametrize(
    "damage",
    [cut_a_file, change_a_file, remove_a_file, remove_the_manifest, cut_the_manifest, empty_the_manifest],
)
def test_a_damaged_checkpoint_is_passed_over_and_can_be_written_anew(tmp_path, damage):
    for step in (1, 2):
        write_checkpoint(tmp_path, step, writer(), keep=5)
    damage(tmp_path / "step_2")
    assert newest_whole(tmp_path) == (1, tmp_path / "step_1")
    write_checkpoint(tmp_path, 2, writer(), keep=5)
    assert newest_whole(tmp_path) == (2, tmp_path / "step_2")


def test_old_checkpoints_go_only_after_the_new_one_is_whole(tmp_path):
    for step in (1, 2):
        write_checkpoint(tmp_path, step, writer(), keep=2)

    def look(folder):
        writer()(folder)
        assert names(tmp_path) == [".writing-step_3", "step_1", "step_2"]

    write_checkpoint(tmp_path, 3, look, keep=2)
    assert names(tmp_path) == ["step_2", "step_3"]


def test_a_damaged_checkpoint_does_not_count_as_kept(tmp_path):
    for step in (1, 2):
        write_checkpoint(tmp_path, step, writer(), keep=2)
    cut_a_file(tmp_path / "step_2")
    write_checkpoint(tmp_path, 3, writer(), keep=2)
    assert newest_whole(tmp_path) == (3, tmp_path / "step_3")
    assert is_whole(tmp_path / "step_1")


def test_a_failed_write_leaves_what_was_there(tmp_path):
    write_checkpoint(tmp_path, 1, writer(), keep=1)

    def fail(folder):
        writer()(folder)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_checkpoint(tmp_path, 2, fail, keep=1)
    assert names(tmp_path) == ["step_1"]
    assert newest_whole(tmp_path) == (1, tmp_path / "step_1")


def test_a_whole_checkpoint_of_the_same_step_is_left_alone(tmp_path):
    write_checkpoint(tmp_path, 1, writer("first"), keep=1)
    write_checkpoint(tmp_path, 1, writer("second"), keep=1)
    assert (tmp_path / "step_1" / "model.bin").read_text() == "first"


def test_left_overs_of_a_killed_save_are_swept_by_the_next(tmp_path):
    (tmp_path / ".writing-step_1").mkdir()
    (tmp_path / ".writing-step_1" / "model.bin").write_text("half")
    assert newest_whole(tmp_path) is None
    write_checkpoint(tmp_path, 2, writer(), keep=1)
    assert names(tmp_path) == ["step_2"]


def test_keeping_none_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least 1"):
        write_checkpoint(tmp_path, 1, writer(), keep=0)
