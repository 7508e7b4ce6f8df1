from stratafl.cli import main

main()
