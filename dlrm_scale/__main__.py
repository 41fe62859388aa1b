"""`python -m dlrm_scale` is the command `dlrm-scale`."""

from dlrm_scale.cli import main

if __name__ == "__main__":
    main()
