from gptexp.cli import main

main()
