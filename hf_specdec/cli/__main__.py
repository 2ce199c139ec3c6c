"""`python -m hf_specdec.cli` is the command `hf-specdec`."""

from . import main


main()
