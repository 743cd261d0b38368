import subprocess
import sys

CODE = """
import ctypes
from controller.commands.target import library_output_to_stderr
c = ctypes.CDLL(None)
with library_output_to_stderr():
    c.puts(b"a line of a library")
    print("another", flush=True)
print("{}")
"""


def test_what_libraries_print_does_not_reach_standard_output():
    run = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout == "{}\n"
    assert "a line of a library" in run.stderr
    assert "another" in run.stderr
