from echo2p2p.cli.main import main

main()
