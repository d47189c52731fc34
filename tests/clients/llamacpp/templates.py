"""The chat templates that llama.cpp knows by name, in Jinja. llama.cpp has them in C++."""

CHATML = """\
{{- bos_token -}}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""

LLAMA3 = """\
{{- bos_token -}}
{%- for message in messages -%}
<|start_header_id|>{{ message.role }}<|end_header_id|>

{{ message.content | trim }}<|eot_id|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|start_header_id|>assistant<|end_header_id|>

{% endif -%}
"""

COMMAND_R = """\
{%- for message in messages -%}
<|START_OF_TURN_TOKEN|>
{%- if message.role == "system" -%}
<|SYSTEM_TOKEN|>
{%- elif message.role == "user" -%}
<|USER_TOKEN|>
{%- else -%}
<|CHATBOT_TOKEN|>
{%- endif -%}
{{ message.content | trim }}<|END_OF_TURN_TOKEN|>
{%- endfor -%}
{%- if add_generation_prompt -%}
<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>
{%- endif -%}
"""

NAMED_TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "command-r": COMMAND_R}
