"""The ledger: what a model, a request and a flow cost, each number with its formula. Imports no torch."""
