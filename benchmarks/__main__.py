"""`python -m benchmarks`: the engine's figures."""

from benchmarks.engine import main

raise SystemExit(main())
