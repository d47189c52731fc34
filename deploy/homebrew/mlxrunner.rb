# A Homebrew formula for a tap: untested, because it was written without a machine that has Homebrew.
#
# The release workflow (../workflows/release.yml) runs formula.py, which fills in `url` and `sha256`,
# and attaches the result to the release. There are no resources: the archive contains a lock with
# the hashes of all packages, and deploy/install.py installs exactly these, as `make` does.
class Mlxrunner < Formula
  desc "Server for language models on MLX, compatible with OpenAI, Anthropic and Ollama"
  homepage "https://github.com/OWNER/mlxrunner"
  url "https://github.com/OWNER/mlxrunner/releases/download/v0.1.0/mlxrunner-0.1.0.tar.gz"
  sha256 "0000000000000000000000000000000000000000000000000000000000000000"
  license "MIT"

  depends_on "python@3.13"

  on_macos do
    depends_on arch: :arm64
    depends_on macos: :sonoma
  end

  # the compiler of the CPU kernels
  on_linux do
    depends_on "gcc" => :build
  end

  # the wheels of the lock are not relocated
  skip_clean "libexec"

  def install
    python = Formula["python@3.13"].opt_bin/"python3.13"
    system python, "deploy/install.py", libexec
    bin.install_symlink libexec/"bin/mlxrunner"
  end

  service do
    run [opt_bin/"mlxrunner", "serve"]
    keep_alive true
    log_path var/"log/mlxrunner.log"
    error_log_path var/"log/mlxrunner.log"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/mlxrunner --version")
    assert_match "builtin", shell_output("#{bin}/mlxrunner list")
  end
end
