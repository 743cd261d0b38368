import pytest
from click.testing import CliRunner

from controller.cli import main


@pytest.mark.parametrize("part", ["5/4", "0/4", "2", "a/b", "1/0"])
def test_a_part_that_is_none_is_told_before_anything_is_asked(tmp_path, part):
    result = CliRunner().invoke(
        main,
        [
            "lab",
            "profile",
            "run",
            "--workload",
            "q.jsonl",
            "--part",
            part,
            "--out",
            str(tmp_path / "o"),
        ],
    )
    assert result.exit_code == 2
    assert "no part such as 2/4" in result.output
    assert not (tmp_path / "o").exists()
