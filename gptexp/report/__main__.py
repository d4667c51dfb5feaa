if __name__ == "__main__":
    from gptexp.cli import run_verb
    from gptexp.report import main

    run_verb(main)
