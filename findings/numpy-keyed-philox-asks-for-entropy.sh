#!/usr/bin/env bash
# numpy 2.4.6: a Philox generator of a given key asks the operating system for entropy that it never uses.
#
# Expected (numpy.random.Philox: "key" is mutually exclusive with "seed", and decides the state alone): making one reads
# nothing but the key. Programs that make a generator for each example, pair or step need that to be cheap.
# Seen: a SeedSequence is made first, without entropy given, so 128 bits are asked of the operating system each time, and
# mixed into a pool that nobody reads. The numbers are right; making the generator takes a few times as long.
# Here: `keyed_generator` hands the key over as an ISeedSequence, which Philox takes as it is: the same numbers, and no
# entropy asked for.
#
# Runs NumPy on its own: counts what it asks of `secrets.randbits`, by key and by an ISeedSequence of the same words.
# Exits with 1 if the behaviour changes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6

cat > "$folder/show.py" <<'PYTHON'
import timeit

import numpy as np
from numpy.random import bit_generator

KEY = 0x0123456789ABCDEFFEDCBA9876543210
asked = []
of_system = bit_generator.randbits


def counted(bits):
    asked.append(bits)
    return of_system(bits)


bit_generator.randbits = counted


class Words(bit_generator.ISeedSequence):
    def generate_state(self, n_words, dtype=np.uint32):
        return np.frombuffer(KEY.to_bytes(16, "little"), dtype)[:n_words]


def by_key():
    return np.random.Philox(key=KEY)


def by_words():
    return np.random.Philox(Words())


bits = {}
for make in (by_key, by_words):
    asked.clear()
    make()
    bits[make.__name__] = sum(asked)

seconds = {make.__name__: min(timeit.repeat(make, number=500, repeat=5)) / 500 for make in (by_key, by_words)}
print("bits asked of the system:", bits)
print("microseconds each:", {name: round(1e6 * value, 1) for name, value in seconds.items()})
assert (np.random.Generator(by_key()).random(1000) == np.random.Generator(by_words()).random(1000)).all()
raise SystemExit(bits != {"by_key": 128, "by_words": 0})
PYTHON
"$folder/env/bin/python" "$folder/show.py"
