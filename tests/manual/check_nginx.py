"""`nginx -t` of the files that a block has put into /etc/nginx/conf.d, below another root.

Knows: the main configuration of an installation. Must not know: the manual.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path


def main(root: Path, program: str) -> int:
    """program: of nginx, or "" if it is not installed."""
    files = sorted((root / "etc/nginx/conf.d").glob("*.conf"))
    if not files:
        print("there is no file in /etc/nginx/conf.d", file=sys.stderr)
        return 1
    if not program:
        return 0
    # the certificates are below the root, and a name would be looked up
    text = "\n".join(file.read_text("utf-8") for file in files)
    text = re.sub(r"(ssl_certificate(?:_key)?) /", rf"\1 {root}/", text)
    with tempfile.TemporaryDirectory() as folder:
        main_file = Path(folder) / "nginx.conf"
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        temporary = "\n".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
        main_file.write_text(
            f"pid {folder}/pid;\nevents {{}}\nhttp {{\naccess_log off;\n{temporary}\n{text}\n}}\n",
            "utf-8",
        )
        command = [program, "-t", "-q", "-p", folder, "-c", str(main_file), "-e", f"{folder}/log"]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
