#!/usr/bin/env bash
# Usage: tools/pythons.sh VERSION...
# Prints the path of an interpreter of each version, such as 3.12, one a line: the one in PATH, or
# the newest that pyenv has. Says on stderr which were not found.
set -euo pipefail
for version in "$@"; do
  candidates=("python$version")
  if command -v pyenv >/dev/null; then
    while IFS= read -r candidate; do candidates+=("$candidate"); done < <(
      find "$(pyenv root)/versions" -path "*/versions/$version*/bin/python" 2>/dev/null | sort -rV)
  fi
  found=
  for candidate in "${candidates[@]}"; do
    # pyenv's commands fail for versions that are not selected.
    if found=$("$candidate" -c "import sys, venv
print(sys.executable if '%d.%d' % sys.version_info[:2] == '$version' else '')" 2>/dev/null) &&
      [ -n "$found" ]; then
      break
    fi
    found=
  done
  if [ -n "$found" ]; then echo "$found"; else echo "Python $version was not found" >&2; fi
done
