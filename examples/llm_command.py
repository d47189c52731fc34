"""The `llm` command, with a file that configures this server.

    pip install llm
    OPENAI_BASE_URL=http://localhost:8080/v1 python examples/llm_command.py

To make the configuration permanent, save the printed file as extra-openai-models.yaml in the folder
that `dirname "$(llm logs path)"` prints.
"""

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

URL = os.environ.get("OPENAI_BASE_URL", "http://localhost:8080/v1")

MOOD = {
    "type": "object",
    "properties": {"mood": {"enum": ["glad", "sad"]}},
    "required": ["mood"],
    "additionalProperties": False,
}

MODEL_FILE = """\
- model_id: local
  model_name: {model}
  api_base: "{url}"
  supports_schema: true
  supports_tools: true
"""


def main() -> None:
    with urllib.request.urlopen(f"{URL}/models") as reply:
        model = json.load(reply)["data"][0]["id"]
    with tempfile.TemporaryDirectory() as folder:
        described = MODEL_FILE.format(model=model, url=URL)
        print(described)
        (Path(folder) / "extra-openai-models.yaml").write_text(described)

        asked = ("-m", "local", "-o", "temperature", "0", "-o", "max_tokens", "120", "Hello!")
        streamed = llm(folder, *asked)
        whole = llm(folder, "--no-stream", *asked)
        print("llm:", whole)
        assert streamed == whole != ""

        # A schema for the response.
        answer = llm(folder, "--schema", json.dumps(MOOD), "--no-stream", *asked)
        print("schema:", answer)
        assert json.loads(answer)["mood"] in ("glad", "sad")

        # The command stores the conversation, and `--continue` resumes it.
        print("go on:", llm(folder, "--continue", *asked[:-1], "And you?"))


def llm(folder: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "llm", *arguments],
        env={**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": "any"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout.strip()


if __name__ == "__main__":
    main()
