"""llama.cpp as an engine: one supervised child process for each loaded model."""
