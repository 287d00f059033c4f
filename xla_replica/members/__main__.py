"""`python -m xla_replica.members`: a lighthouse, or a live run on this machine."""

from xla_replica.members.supervisor import main

if __name__ == "__main__":
    main()
