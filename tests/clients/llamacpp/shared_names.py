"""Names that the tests and the plugin share. The plugin itself can be imported only in llama.cpp's
folder of tests."""

from pathlib import Path

PLUGIN = "tests.clients.llamacpp.plugin"

# the environment variable with the file for the results
RESULTS_VARIABLE = "LLAMACPP_RESULTS"

MODEL = Path(__file__).resolve().parents[4] / "shared" / "data" / "models" / "stories260K"
