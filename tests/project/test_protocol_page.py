"""docs/protocol-frames.md lists the frame types that the code has, by number and name, and its examples are the encoder's bytes."""

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The frames of the page's examples, in order.
PROGRAM = """
#include <cstdio>
#include "agree/frame.h"
using namespace ringtrain;
void Print(const Frame& frame) {
  for (unsigned char byte : frame.Encode()) std::printf("%02x ", byte);
  std::puts("");
}
int main() {
  Frame resend;
  resend.type = FrameType::kResend;
  resend.epoch = 300;
  resend.process_set = 1;
  resend.ids = {3, 4, 6};
  Print(resend);
  Frame ready;
  ready.type = FrameType::kReady;
  ready.epoch = 300;
  ready.ids = {1, 2};
  Request request;
  request.name = "x";
  request.operation = Operation::kAllreduce;
  request.reduction = Reduction::kAverage;
  request.tensors = {{DType::kFloat32, {4}}};
  ready.requests = {request};
  Print(ready);
}
"""


def test_every_frame_type_is_documented():
    enumeration = re.search(
        r"enum class FrameType : uint8_t \{(.*?)\};", (ROOT / "native/agree/frame.h").read_text(), re.DOTALL
    )[1]
    in_code = {
        number: re.sub("(?<=[a-z])(?=[A-Z])", " ", name).lower()
        for name, number in re.findall(r"\bk(\w+) = (\d+)", enumeration)
    }
    in_page = dict(
        re.findall(r"^\| (\d+) \| ([a-z ]+) \|", (ROOT / "docs/protocol-frames.md").read_text(), re.MULTILINE)
    )
    assert len(in_code) >= 9 and in_page == in_code


def test_examples_are_the_bytes_of_the_encoder(tmp_path):
    (tmp_path / "main.cc").write_text(PROGRAM)
    sources = [
        ROOT / "native" / name for name in ("agree/check.cc", "agree/frame.cc", "agree/request.cc", "tables/tables.cc")
    ]
    compiler = [os.environ.get("CXX", "g++"), "-std=c++17", "-O0", f"-I{ROOT / 'native'}"]
    subprocess.run([*compiler, tmp_path / "main.cc", *sources, "-o", tmp_path / "main"], check=True)
    encoded = subprocess.run([tmp_path / "main"], check=True, capture_output=True, text=True).stdout.splitlines()
    blocks = re.findall(
        r"^```frame\n(.*?)^```", (ROOT / "docs/protocol-frames.md").read_text(), re.MULTILINE | re.DOTALL
    )
    of_page = [[byte for line in block.splitlines() for byte in line.partition("#")[0].split()] for block in blocks]
    assert of_page == [line.split() for line in encoded] and len(of_page) == 2
