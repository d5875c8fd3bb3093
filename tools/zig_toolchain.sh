#!/usr/bin/env bash
# Usage: tools/zig_toolchain.sh ZIG ARCHITECTURE FOLDER
# Makes in FOLDER what CMake needs to compile for Linux on ARCHITECTURE (x86_64 or aarch64) with
# glibc 2.28 or later, by Zig's Clang and libc++: commands c++ and ar, and toolchain.cmake.
set -euo pipefail
zig=$1 architecture=$2
mkdir -p "$3"
folder=$(cd "$3" && pwd)
target=$architecture-linux-gnu.2.28

# pthread_exit unwinds by libgcc_s. Zig links an unwinder of its own into each library, and libc++'s
# handlers would read the contexts of the one with the functions of the other. This names
# libgcc_s.so.1, which every glibc system has, for the linker to find first.
rm -f "$folder"/unwind.{c,map}
previous=
while read -r version names; do  # the version in which libgcc_s has these
  for name in $names; do echo "void _Unwind_$name(void) {}"; done >> "$folder/unwind.c"
  # shellcheck disable=SC2086  # a word for each name
  echo "$version { global: $(printf "_Unwind_%s; " $names)} $previous;" >> "$folder/unwind.map"
  previous=$version
done <<END
GCC_3.0 DeleteException Find_FDE ForcedUnwind GetDataRelBase GetGR GetIP GetLanguageSpecificData GetRegionStart GetTextRelBase RaiseException Resume SetGR SetIP
GCC_3.3 Backtrace FindEnclosingFunction GetCFA Resume_or_Rethrow
GCC_4.2.0 GetIPInfo
END
"$zig" cc -target "$target" -shared -nostdlib -fPIC -Wl,-soname,libgcc_s.so.1 \
  -Wl,--version-script,"$folder/unwind.map" -o "$folder/libgcc_s.so.1" "$folder/unwind.c"

# What the resolvers of target_clones ask for the processor's features: Zig's runtime library lacks
# it, and GCC's has it.
runtime=
if [ "$architecture" = x86_64 ]; then runtime=$(gcc -print-libgcc-file-name); fi

cat > "$folder/c++" <<END
#!/bin/sh
case " \$* " in
  *" -c "* | *" -E "*) exec "$zig" c++ -target $target "\$@" ;;
  *) exec "$zig" c++ -target $target "\$@" "$folder/libgcc_s.so.1" $runtime ;;
esac
END
for command in ar ranlib; do printf '#!/bin/sh\nexec "%s" %s "$@"\n' "$zig" $command > "$folder/$command"; done
chmod +x "$folder"/{c++,ar,ranlib}
cat > "$folder/toolchain.cmake" <<END
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR $architecture)
set(CMAKE_CXX_COMPILER $folder/c++)
set(CMAKE_AR $folder/ar)
set(CMAKE_RANLIB $folder/ranlib)
# nanobind uses stderr, whose header comes with libstdc++'s others and not with libc++'s.
set(CMAKE_CXX_FLAGS_INIT "-include stdio.h")
set(CMAKE_STRIP true)  # the linker does it, for any architecture
set(CMAKE_MODULE_LINKER_FLAGS_INIT "-Wl,-s -Wl,--gc-sections")
END
