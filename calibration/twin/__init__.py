"""The twin: vLLM's scheduler as a pure discrete-event engine. It calls a step-time model and owns no formula.

    config      what the engine is told: vLLM's flags by vLLM's names
    content     what a prompt consists of, as far as the prefix cache can see
    blocks      the KV pool: free blocks, prefix cache, eviction order
    sequence    one request inside the engine
    decoders    the running sequences that get tokens each step
    scheduler   decides: who runs in the next step, who is preempted
    counters    what vLLM counts, where vLLM counts it
    engine      applies: steps in, outputs out, one deadline at a time
    kernel      the virtual clock
    simulate    users on the virtual clock: a load in, a RequestTrace and gauge series out

Rules are those of vLLM 0.32.0 (``vllm/v1/core``); each docstring names the file and symbol a rule was read in.
"""
