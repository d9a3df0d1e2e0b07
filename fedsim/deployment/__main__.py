"""The process of a node."""

import sys

from fedsim.deployment._node import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
