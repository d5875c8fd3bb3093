import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
CHECK = ROOT / "tools" / "check_layers.py"


def check(root: pathlib.Path) -> tuple[int, list[str]]:
    result = subprocess.run(
        [sys.executable, str(CHECK), str(root)], check=False, capture_output=True, text=True
    )
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    if lines and lines[-1].startswith("members that several sources"):
        lines.pop()
    return result.returncode, lines


def test_the_repository_keeps_to_its_layers():
    assert check(ROOT) == (0, [])


@pytest.mark.parametrize(
    ("path", "text", "offence"),
    [
        ("cpp/wire/a.h", '#include "session/b.h"', "wire must not include session/b.h"),
        ("cpp/io/a.cc", '\n  #  include "tensor/b.h"', "io must not include tensor/b.h"),
        ("cpp/group/a.cc", '#include "view.h"', 'includes are written "layer/file.h"'),
        ("cpp/group/a.cc", '#include "boost/b.h"', "boost/b.h is in no layer"),
        ("cpp/rpc/a.cc", "#include <thread>", "must not include <thread>"),
        ("cpp/rpc/a.cc", "auto t = steady_clock::now();", "are told the time"),
        (
            "cpp/group/a.cc",
            "for (auto& [k, v] : map_) {}\nstd::unordered_map<int, std::set<int>> map_;",
            "map_ is unordered",
        ),
        ("cpp/session/a.cc", "#include <sys/socket.h>", "must not include <sys/socket.h>"),
        ("cpp/zebra/a.cc", "", "zebra is no layer"),
        ("cpp/runtime/a.cc", "", "runtime is no layer"),
        (
            "cpp/runtime/engine/a.cc",
            '#include "runtime/peer/b.h"',
            "runtime/engine must not include runtime/peer/b.h",
        ),
        ("moolink/a.py", "import torch", "must not import torch at module level"),
        (
            "moolink/data/b.py",
            "try:\n  from jax import numpy\nexcept E: pass",
            "must not import jax",
        ),
        ("moolink/a.py", "class A:\n  import torch.nn", "must not import torch.nn"),
        ("moolink/torch/a.py", "import jax", "must not import jax"),
        ("moolink/a.py", "from moolink import torch", "must not import moolink.torch"),
        ("moolink/a.py", "from moolink.torch import x", "must not import moolink.torch"),
        ("moolink/zebra/a.py", "", "zebra is no package"),
        ("moolink/rpc/a.py", "from moolink import group", "rpc must not import moolink.group"),
        ("moolink/data/a.py", "import moolink.rpc.queue", "must not import moolink.rpc.queue"),
        ("examples/torch/a.py", "import jax", "must not import jax"),
        ("examples/common/a.py", "def f():\n  import torch", "must not import torch"),
    ],
)
def test_an_offence_is_found_where_it_is(tmp_path, path, text, offence):
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(text)
    status, lines = check(tmp_path)
    assert status == 1
    (line,) = lines
    assert offence in line
    number = next(
        (n for n, t in enumerate(text.splitlines(), 1) if "clude" in t or "import" in t), 1
    )
    assert line.startswith(f"{path}:{number}: ")


def test_units_that_include_one_another_are_named(tmp_path):
    folder = tmp_path / "cpp" / "group"
    folder.mkdir(parents=True)
    (folder / "a.h").write_text('#include "group/b.h"')
    (folder / "b.h").write_text("")
    (folder / "b.cc").write_text('#include "group/b.h"\n#include "group/c.h"')
    (folder / "c.h").write_text('#include "group/a.h"')
    (folder / "d.h").write_text('#include "group/a.h"')
    offence = "these units include one another: group/a, group/b, group/c"
    assert check(tmp_path) == (1, [f"cpp/group/a.h:1: {offence}"])


CHAPTERS = """\
class Table {
 public:
  explicit Table(int rows) : rows_(rows) {}
  int rows() const { return rows_; }

 private:
  struct Row {
    int inner_ = 0;
  };
  int find(Row row_of, int from) const;

  const int rows_;  // not names_
  std::map<int, Row> a_ MOOLINK_GUARDED;
  bool b_ = false;
  std::array<int, 2> c_{1, 2};
  int d_[2];
};
"""
CHAPTER = """\
int Table::find(Row row_of, int from) const {
  return rows_ + a_.size() + inner_;
}

bool Table::full() { return b_; }

static int other() {
  return c_ + d_;
}
"""


def test_the_members_that_sources_of_a_class_share_are_counted(tmp_path):
    sys.path.insert(0, str(CHECK.parent))
    from check_layers import shared_members

    folder = tmp_path / "cpp" / "replay"
    folder.mkdir(parents=True)
    (folder / "table.h").write_text(CHAPTERS)
    (folder / "table.cc").write_text(CHAPTER + "Table::~Table() {\n  c_ = d_[0];\n}\n")
    assert dict(shared_members(tmp_path)) == {}
    (folder / "find.cc").write_text(CHAPTER + "void Table::empty() {\n  c_ = {};\n}\n")
    assert dict(shared_members(tmp_path)) == {
        "replay/table.h Table": ["a_", "b_", "c_", "rows_"],
    }
    status, (line,) = check(tmp_path)
    assert status == 1
    assert line == (
        "cpp/replay/table.h:1: more than 3 members of Table are used by several of its sources: "
        "a_, b_, c_, rows_"
    )


SORTED = """std::unordered_map<int, int> calls_;
for (const auto& [id, call] : calls_) {
  ids.push_back(id);
}
std::sort(ids.begin(), ids.end());
"""


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("cpp/rpc/a.cc", SORTED),
        (
            "cpp/runtime/peer/a.cc",
            '#include "base/error.h"\n#include <thread>\n#include "rpc/node.h"',
        ),
        ("cpp/transport/tcp/a.cc", '#include "transport/transport.h"\n#include "io/loop.h"'),
        ("cpp/group/a.cc", '#include <vector>\n// #include "bind/x.h"'),
        (
            "cpp/rpc/a.cc",
            "#include <chrono>\nstd::unordered_map<int, int> a_;\nfor (auto b : c_) {}",
        ),
        ("moolink/a.py", "def f():\n  import torch"),
        ("moolink/a.py", "if TYPE_CHECKING:\n  import torch"),
        ("moolink/torch/a.py", "import torch"),
        ("moolink/rpc/a.py", "from moolink import errors\nfrom moolink.data import trees"),
        ("moolink/rpc/a.py", "def f():\n  from moolink.group import Group"),
        ("examples/jax/a.py", "import jax.numpy as jnp"),
    ],
)
def test_what_is_allowed_passes(tmp_path, path, text):
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert check(tmp_path) == (0, [])
