"""OpenAI-compatible HTTP over one engine. Knows HTTP and text; the engine's handle, never tensors.

config      limits and addresses              launch         model -> service -> running server
app         routes and middleware             service        what every endpoint shares
protocol    request bodies (pydantic)         responses      what is sent back (msgspec)
chat, completions, tokenization, models, health, live     one module per group of endpoints
completion  one choice: ids -> text           sse            event streams and disconnects
gate        keys, body limit, request ids     errors, metrics, token_text
"""
