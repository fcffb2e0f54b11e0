"""One data-parallel rank of vLLM: vllm_generate.py <model> <rank> <num_ranks> <tensor_parallel> <port> <file>. Writes
{prompt: [token, ...]} to the file."""

import json
import os
import sys


def main(model, rank, num_ranks, tensor_parallel, port, file):
    os.environ |= {
        "VLLM_DP_RANK": rank,
        "VLLM_DP_RANK_LOCAL": rank,
        "VLLM_DP_SIZE": num_ranks,
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": port,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    from vllm import LLM, SamplingParams

    sizes = {"max_model_len": 64, "max_num_batched_tokens": 128, "max_num_seqs": 8}
    llm = LLM(
        model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        enable_expert_parallel=int(num_ranks) > 1,
        tensor_parallel_size=int(tensor_parallel),
        **sizes,
    )
    mine = range(int(rank), 6, int(num_ranks))
    prompts = [{"prompt_token_ids": [3 + (7 * i + 5 * j) % 250 for j in range(5 + i)]} for i in mine]
    # Lengths differ, so that one rank runs out of work before the other.
    how = [SamplingParams(temperature=0, max_tokens=4 + 3 * i, ignore_eos=True, detokenize=False) for i in mine]
    tokens = [list(done.outputs[0].token_ids) for done in llm.generate(prompts, how)]
    with open(file + ".part", "w") as part:
        json.dump(dict(zip(mine, tokens, strict=True)), part)
    os.replace(file + ".part", file)


if __name__ == "__main__":
    main(*sys.argv[1:])
