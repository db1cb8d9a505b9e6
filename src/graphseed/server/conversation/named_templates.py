"""Chat templates that `--chat-template` knows by name, and the one for models without any.

Owns their texts, written for Jinja: each gives the form that models of that family were trained on,
without a beginning of sequence, which the tokenizer puts. Does not render them.
"""

from typing import Final

CHATML: Final = (
    "{%- for message in messages -%}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
)

NAMED: Final[dict[str, str]] = {
    "chatml": CHATML,
    "command-r": (
        "{%- set marks = {'system': '<|SYSTEM_TOKEN|>', 'user': '<|USER_TOKEN|>', "
        "'assistant': '<|CHATBOT_TOKEN|>'} -%}"
        "{%- for message in messages -%}"
        "{{ '<|START_OF_TURN_TOKEN|>' + marks.get(message.role, '<|SYSTEM_TOKEN|>') }}"
        "{{ message.content | trim }}<|END_OF_TURN_TOKEN|>"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{%- endif -%}"
    ),
    "deepseek": (
        "{%- for message in messages -%}"
        "{%- if message.role == 'user' -%}### Instruction:\n{{ message.content }}\n"
        "{% elif message.role == 'assistant' -%}### Response:\n{{ message.content }}\n<|EOT|>\n"
        "{% else -%}{{ message.content }}{%- endif -%}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}### Response:\n{% endif -%}"
    ),
    "deepseek2": (
        "{%- for message in messages -%}"
        "{%- if message.role == 'user' -%}User: {{ message.content }}\n\n"
        "{% elif message.role == 'assistant' -%}"
        "Assistant: {{ message.content }}<｜end▁of▁sentence｜>"
        "{%- else -%}{{ message.content }}\n\n{% endif -%}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}Assistant:{%- endif -%}"
    ),
    "deepseek3": (
        "{%- for message in messages -%}"
        "{%- if message.role == 'user' -%}<｜User｜>{{ message.content }}"
        "{%- elif message.role == 'assistant' -%}"
        "<｜Assistant｜>{{ message.content }}<｜end▁of▁sentence｜>"
        "{%- else -%}{{ message.content }}\n\n{% endif -%}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}<｜Assistant｜>{%- endif -%}"
    ),
    "falcon3": (
        "{%- for message in messages -%}<|{{ message.role }}|>\n{{ message.content }}\n"
        "{% endfor -%}"
        "{%- if add_generation_prompt -%}<|assistant|>\n{% endif -%}"
    ),
    "gemma": (
        "{%- for message in messages -%}"
        "{%- if message.role == 'system' -%}{{ raise_exception('no system role') }}{%- endif -%}"
        "<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}\n"
        "{{- '\n' + message.content | trim }}<end_of_turn>\n"
        "{% endfor -%}"
        "{%- if add_generation_prompt -%}<start_of_turn>model\n{% endif -%}"
    ),
    "granite": (
        "{%- for message in messages -%}"
        "<|start_of_role|>{{ message.role }}<|end_of_role|>{{ message.content }}<|end_of_text|>\n"
        "{% endfor -%}"
        "{%- if add_generation_prompt -%}<|start_of_role|>assistant<|end_of_role|>{%- endif -%}"
    ),
    "llama2": (
        "{%- set ns = namespace(system='') -%}"
        "{%- for message in messages -%}"
        "{%- if message.role == 'system' -%}"
        "{%- set ns.system = '<<SYS>>\n' + message.content + '\n<</SYS>>\n\n' -%}"
        "{%- elif message.role == 'user' -%}[INST] {{ ns.system + message.content }} [/INST]"
        "{%- set ns.system = '' -%}"
        "{%- else -%}{{ ' ' + message.content + ' </s><s>' }}{%- endif -%}"
        "{%- endfor -%}"
    ),
    "llama3": (
        "{%- for message in messages -%}"
        "<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
        "{{- '\n\n' + message.content | trim }}<|eot_id|>"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}"
        "<|start_header_id|>assistant<|end_header_id|>{{ '\n\n' }}"
        "{%- endif -%}"
    ),
    "mistral-v3": (
        "{%- set ns = namespace(system='') -%}"
        "{%- for message in messages -%}"
        "{%- if message.role == 'system' -%}{%- set ns.system = message.content + '\n\n' -%}"
        "{%- elif message.role == 'assistant' -%}{{ ' ' + message.content + '</s>' }}"
        "{%- else -%}[INST] {{ ns.system + message.content }}[/INST]{%- set ns.system = '' -%}"
        "{%- endif -%}"
        "{%- endfor -%}"
    ),
    "mistral-v7": (
        "{%- for message in messages -%}"
        "{%- if message.role == 'system' -%}"
        "[SYSTEM_PROMPT] {{ message.content }}[/SYSTEM_PROMPT]"
        "{%- elif message.role == 'assistant' -%}{{ ' ' + message.content + '</s>' }}"
        "{%- else -%}[INST] {{ message.content }}[/INST]{%- endif -%}"
        "{%- endfor -%}"
    ),
    "phi3": (
        "{%- for message in messages -%}<|{{ message.role }}|>\n{{ message.content }}<|end|>\n"
        "{% endfor -%}"
        "{%- if add_generation_prompt -%}<|assistant|>\n{% endif -%}"
    ),
    "phi4": (
        "{%- for message in messages -%}"
        "<|im_start|>{{ message.role }}<|im_sep|>{{ message.content }}<|im_end|>"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}<|im_start|>assistant<|im_sep|>{%- endif -%}"
    ),
    "vicuna": (
        "{%- for message in messages -%}"
        "{%- if message.role == 'system' -%}{{ message.content }}\n\n"
        "{% elif message.role == 'user' -%}USER: {{ message.content }}\n"
        "{% else -%}ASSISTANT: {{ message.content }}</s>\n"
        "{% endif -%}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}ASSISTANT:{%- endif -%}"
    ),
    "zephyr": (
        "{%- for message in messages -%}<|{{ message.role }}|>\n{{ message.content }}</s>\n"
        "{% endfor -%}"
        "{%- if add_generation_prompt -%}<|assistant|>\n{% endif -%}"
    ),
}
