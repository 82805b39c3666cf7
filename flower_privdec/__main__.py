"""`python -m flower_privdec` is `privdec`."""

from flower_privdec.cli.main import main

if __name__ == "__main__":
    main()
