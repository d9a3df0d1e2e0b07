"""``python -m fedsim``: the command line."""

from fedsim.commands import main

raise SystemExit(main())
