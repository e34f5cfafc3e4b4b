"""Chat templates of well-known models, in short forms that have the same behaviour.

`docs.generate` converts those of repositories for its table.
"""

CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITH_DEFAULT = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' "
    "+ message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
NO_SYSTEM = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else 'user') + '\n' "
    "+ message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)

# Of Llama 2: the system message is in the first user message, and each user message starts with the
# start token.
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# Of Mistral: only the replies are trimmed.
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)
# As fine-tuning tools save it: a tag of Transformers marks the text of replies.
MARKED = """{% for m in messages %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{%- endgeneration %}
    {%- else %}{{ m.content + '<|im_end|>' }}{% endif %}
    {{- '\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
PLAIN = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)
# In the form of Qwen 3: replies before the last question lose their thinking, and later ones get it
# in a fixed form.
KEEPS_LAST_THINKING = """{%- set at = namespace(question=messages|length - 1, found=false) %}
{%- for m in messages|reverse %}
    {%- set is_response = m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>') %}
    {%- if m.role == 'user' and not at.found and not is_response %}
        {%- set at.found = true %}{%- set at.question = messages|length - loop.index %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set text = m.content %}{%- set thought = '' %}
    {%- if m.role == 'assistant' and '</think>' in m.content %}
        {%- set text = m.content.split('</think>')[-1].lstrip('\n') %}
        {%- set thought = m.content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' + m.role + '\n' }}
    {%- if m.role == 'assistant' and loop.index0 > at.question and (loop.last or thought) %}
        {{- '<think>\n' + thought + '\n</think>\n\n' + text.lstrip('\n') }}
    {%- else %}{{- text }}{%- endif %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
# In the form of DeepSeek R1: no reply has its thinking, and system messages are joined.
NO_THINKING = """{{ bos_token }}{% for m in messages if m.role == 'system' %}
{{- ('' if loop.first else '\n\n') + m.content }}{% endfor %}
{%- for m in messages %}{% if m.role == 'user' %}{{ '<|User|>' + m.content }}
{%- elif m.role == 'assistant' %}{{ '<|Assistant|>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"""
# In the form of Llama 3.2: the first message has the date, later system messages have none.
WITH_DATE = """{{- bos_token }}
{%- set today = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' %}
{%- set has_system = messages[0].role == 'system' %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + today + '\n\n' }}
{{- messages[0].content | trim if has_system else '' }}{{- '<|eot_id|>' }}
{%- if tools is not none %}{{ raise_exception('no tools') }}{%- endif %}
{%- for m in messages[1 if has_system else 0:] %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""
# In the form of gpt-oss: a date in the first message, and another end of the last reply.
CHANNELS = """{{- '<|start|>system<|message|>Current date: ' + strftime_now('%Y-%m-%d') + '<|end|>' }}
{%- for m in messages %}
    {%- if m.role == 'system' %}{{- '<|start|>developer<|message|># Instructions\n\n' + m.content + '<|end|>' }}
    {%- elif m.role == 'user' %}{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}
    {%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
        {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
# In the form of Gemma 3: the system message precedes the first user message, and only that is
# trimmed.
PREFIXED = """{{ bos_token }}
{%- set has_system = messages[0].role == 'system' %}
{%- for m in (messages[1:] if has_system else messages) %}
    {%- if (m.role == 'user') == (loop.index0 % 2 == 1) %}{{ raise_exception('roles must alternate') }}{% endif %}
    {{- '<start_of_turn>' + ('user' if m.role == 'user' else 'model') + '\n' }}
    {{- messages[0].content + '\n\n' if has_system and loop.first else '' }}
    {{- m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
# In the form of TinyLlama, which is that of Zephyr.
ZEPHYR = """{% for m in messages %}
{{ '<|' + m.role + '|>\n' + m.content + eos_token }}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
# In the form of Granite 3: the default system message has the date.
DATED_DEFAULT = """{%- set today = strftime_now('%B %d, %Y') %}
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set turns = messages[1:] %}
{%- else %}{%- set system = 'Today is ' + today + '. You are helpful.' %}{%- set turns = messages %}{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system + '<|end_of_text|>\n' }}
{%- for m in turns %}
    {{- '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\n' }}
    {%- if loop.last and add_generation_prompt %}{{- '<|start_of_role|>assistant<|end_of_role|>' }}{%- endif %}
{%- endfor %}"""
# In the form of Phi-3.5: a dialogue without a generation prompt has an end token, and an empty
# system message is left out.
ENDED = """{% for m in messages %}{% if m.role != 'system' or m.content %}
{{- '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endif %}{% endfor %}
{{- '<|assistant|>\n' if add_generation_prompt else eos_token }}"""
# In the form of Phi-4-mini: the same without line breaks.
ENDED_LINE = """{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}
{{- '<|assistant|>' if add_generation_prompt else eos_token }}"""
# In the form of OLMo 2: no line break follows the last reply.
UNBROKEN_END = """{{ bos_token }}{% for m in messages %}
{{- '<|' + m.role + '|>\n' + m.content }}
{{- '\n' if m.role != 'assistant' else eos_token if loop.last else eos_token + '\n' }}
{%- if loop.last and add_generation_prompt %}{{- '<|assistant|>\n' }}{% endif %}
{%- endfor %}"""
# In the form of Mistral 7B v0.3: the system message is in the last message if that is the user's.
SYSTEM_LAST = """{%- set has_system = messages[0].role == 'system' %}{{- bos_token }}
{%- for m in (messages[1:] if has_system else messages) %}
    {%- if (m.role == 'user') == (loop.index0 % 2 == 1) %}{{ raise_exception('roles must alternate') }}{% endif %}
    {%- if m.role == 'user' %}
        {{- '[INST] ' + (messages[0].content + '\n\n' if has_system and loop.last else '') + m.content + '[/INST]' }}
    {%- else %}{{- ' ' + m.content | trim + eos_token }}{%- endif %}
{%- endfor %}"""
# In the form of Mistral Nemo: without spaces, and replies are not trimmed.
SYSTEM_LAST_UNTRIMMED = SYSTEM_LAST.replace("[INST] ", "[INST]").replace("' ' + m.content | trim", "m.content")
# In the form of SmolLM3: the system message switches the thinking, and loses the switch.
SWITCHED = """{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- set mode = '/no_think' if '/no_think' in system else '/think' %}
{{- '<|im_start|>system\nReasoning Mode: ' + mode + '\n\n' }}
{{- system.replace('/no_think', '').replace('/think', '').rstrip() + '\n\n<|im_end|>\n' }}
{%- set start = '<|im_start|>assistant\n' + ('<think>\n\n</think>\n' if mode == '/no_think' else '') %}
{%- for m in messages if m.role != 'system' %}
    {%- if m.role == 'user' %}{{- '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}
    {%- else %}{% generation %}{{- start + m.content.lstrip('\n') + '<|im_end|>\n' }}{% endgeneration %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- start }}{%- endif %}"""
# Definitions of tools as JSON, calls and their results: in the form of Qwen 2.5 and Hermes.
TOOLS_AS_JSON = """{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- '# Tools\n<tools>' }}
    {%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- for call in m.tool_calls %}
            {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
            {{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' + (call.arguments | tojson) }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
# In the form of Llama 3.1: tools in the first user message, one call for each message.
TOOLS_IN_USER = """{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" + system + "<|eot_id|>" }}
{%- if tools is not none %}
    {%- if messages | length == 0 %}{{- raise_exception("no first user message") }}{%- endif %}
    {%- set first = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\n' }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\n\n" }}{%- endfor %}
    {{- first + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("one call at once") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""
# In the form of Mistral with tools: filters of lists, a namespace, and checks of the order and ids.
TOOLS_BEFORE_LAST = """{%- if messages[0]["role"] == "system" %}
    {%- set system = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for m in loop_messages %}
    {%- if not (m.role == "tool" or (m.tool_calls is defined and m.tool_calls is not none)) %}
        {%- if (m["role"] == "user") != (ns.index % 2 == 0) %}{{- raise_exception("roles must alternate") }}{%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for m in loop_messages %}
    {%- if m["role"] == "user" %}
        {%- if tools is not none and (m == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}{{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val|tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system is defined %}{{- "[INST] " + system + "\n\n" + m["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + m["content"] + "[/INST]" }}{%- endif %}
    {%- elif m.tool_calls is defined and m.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for call in m.tool_calls %}
            {%- if call.id|length != 9 %}{{- raise_exception("ids have 9 characters") }}{%- endif %}
            {{- call.function|tojson|replace("}", "") ~ ', "id": "' ~ call.id ~ '"}' }}
            {{- ", " if not loop.last else "]" }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif m["role"] == "assistant" %}{{- " " + m["content"]|trim + eos_token}}
    {%- elif m["role"] == "tool" %}
        {%- if m.content is defined and m.content.content is defined %}{%- set content = m.content.content %}
        {%- else %}{%- set content = m.content %}{%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + content|string + ', "call_id": "' }}
        {{- m.tool_call_id|default("x") + '"}[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception("unknown role " + m["role"]) }}{%- endif %}
{%- endfor %}"""
# In the form of Command R: macros that write a JSON Schema as a type, with calls of themselves.
MACROS = """{%- macro type_of(schema) -%}
    {%- if schema.type == 'array' -%}List[{{ type_of(schema['items']) }}]
    {%- elif schema.type == 'object' -%}
        Dict[{% for name, inner in schema.properties.items() %}{{ name }}={{ type_of(inner) }}
        {%- if not loop.last %}, {% endif %}{% endfor %}]
    {%- else -%}{{ {'string': 'str', 'integer': 'int'}.get(schema.type, 'Any') }}{%- endif -%}
{%- endmacro -%}
{%- macro turn(role, text) %}<|START|>{{ role | upper }}: {{ caller() if caller else '' }}{{ text }}<|END|>
{%- endmacro -%}
{{ bos_token }}{% for tool in tools or [] %}def {{ tool.function.name }}({{ type_of(tool.function.parameters) }})
{% endfor %}
{%- for m in messages if m.role in ('user', 'assistant', 'system') -%}
{% call turn(m.role, m.content or '') %}[{{ loop.index }}/{{ loop.length }}] {% endcall %}
{%- endfor -%}{{ turn('assistant', '')[:-7] if add_generation_prompt else '' }}"""
# Loop controls, a recursive loop, filters and tests, a block that is set, and text over lines.
CONTROLS = """
{% set limit = 3 %}
{% for m in messages %}
    {% if loop.index > 50 %}{% break %}{% endif %}
    {% if m.role == 'tool' or not m.content %}{% continue %}{% endif %}
    {% set body %}
<|{{ m.role }}|>{{ m.content | trim }}
    {% endset %}
    {{ body | replace('\r', '') }}{{ loop.cycle('a', 'b') }}{{ loop.changed(m.role) | string | lower }}
    {# a comment #}
    {%- if loop.previtem is defined and loop.previtem.role == m.role %} again{% endif %}
{% else %}
none
{% endfor %}
{{ messages | map(attribute='role') | unique | join(',') }} {{ messages | groupby('role') | length }}
{%- for group in messages | batch(limit) %}{{ group | length }};{% endfor %}
{%- for item in [{'n': 1, 'c': [{'n': 2}, {'n': 3, 'c': [{'n': 4}]}]}] recursive %}
{{- item.n }}({{ loop(item.c or []) }}){% endfor %}
{% if (messages | last).role is eq 'user' and add_generation_prompt is true %}<|assistant|>{% endif %}"""
# In the form of DeepSeek: state in a namespace over two loops, and messages without a content.
STATEFUL = """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(is_first=true, is_tool=false, system='') %}
{%- for m in messages if m['role'] == 'system' %}{% set ns.system = ns.system + m['content'] %}{% endfor %}
{{- bos_token }}{{ ns.system }}
{%- for m in messages %}
{%- if m['role'] == 'user' %}{%- set ns.is_tool = false -%}{{ '<|User|>' + m['content'] }}{%- endif %}
{%- if m['role'] == 'assistant' and 'tool_calls' in m %}
    {%- for call in m['tool_calls'] %}
        {{- ('<|Assistant|>' if ns.is_first else '\n') + call['type'] + ' ' + call['function']['name'] }}
        {{- '```json\n' + call['function']['arguments'] | string + '```' }}{%- set ns.is_first = false %}
    {%- endfor %}{{- eos_token }}
{%- elif m['role'] == 'assistant' %}
    {%- set content = m['content'] %}
    {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
    {{- ('<|Tools|>' if ns.is_tool else '<|Assistant|>') + content + eos_token }}{%- set ns.is_tool = false -%}
{%- elif m['role'] == 'tool' %}{%- set ns.is_tool = true -%}{{ '<|Result|>' + m['content'] }}
{%- endif %}
{%- endfor -%}
{% if ns.is_tool %}{{ '<|End|>' }}{% elif add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"""
# In the form of Phi-4: the role between special tokens; and of Gemma 3, whose contents have parts.
SEPARATED = """{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] -%}
{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"""
PARTS = """{{ bos_token }}{%- for m in messages -%}
{{ '<start_of_turn>' + m.role }}
{% if m['content'] is string -%}{{ m['content'] | trim }}
{%- elif m['content'] is iterable -%}{%- for item in m['content'] -%}
    {%- if item['type'] == 'image' -%}{{ '<image>' }}
    {%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
{%- endfor -%}{%- else -%}{{ raise_exception("Invalid content type") }}{%- endif -%}
{{ '<end_of_turn>\n' }}{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"""
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = {
    "ChatML": CHATML, "default": WITH_DEFAULT, "Llama 2": LLAMA2, "Llama 3": LLAMA3, "Mistral": MISTRAL, "plain": PLAIN,
    "no system": NO_SYSTEM, "keeps last thinking": KEEPS_LAST_THINKING, "no thinking": NO_THINKING, "date": WITH_DATE,
    "channels": CHANNELS, "prefixed": PREFIXED, "Zephyr": ZEPHYR, "dated default": DATED_DEFAULT, "ended": ENDED,
    "ended line": ENDED_LINE, "unbroken end": UNBROKEN_END, "system last": SYSTEM_LAST,
    "system last untrimmed": SYSTEM_LAST_UNTRIMMED, "marked": MARKED, "switched": SWITCHED,
    "tools as JSON": TOOLS_AS_JSON, "tools in user": TOOLS_IN_USER, "tools before last": TOOLS_BEFORE_LAST,
    "macros": MACROS, "controls": CONTROLS, "stateful": STATEFUL, "separated": SEPARATED, "parts": PARTS,
}  # fmt: skip
# Templates of the chat models among the repositories of tests/data/configs.
CHAT_MODELS = {
    "allenai/OLMo-2-0425-1B-Instruct": UNBROKEN_END,
    "google/gemma-2-2b-it": NO_SYSTEM,
    "google/gemma-3-1b-it": PREFIXED,
    "HuggingFaceTB/SmolLM2-135M-Instruct": WITH_DEFAULT,
    "HuggingFaceTB/SmolLM3-3B": SWITCHED,
    "ibm-granite/granite-3.3-2b-instruct": DATED_DEFAULT,
    "meta-llama/Llama-3.2-1B-Instruct": WITH_DATE,
    "microsoft/Phi-3.5-mini-instruct": ENDED,
    "microsoft/Phi-4-mini-instruct": ENDED_LINE,
    "mistralai/Mistral-7B-Instruct-v0.3": SYSTEM_LAST,
    "openai/gpt-oss-20b": CHANNELS,
    "Qwen/Qwen2.5-0.5B-Instruct": WITH_DEFAULT,
    "Qwen/Qwen2.5-0.5B-Instruct-AWQ": WITH_DEFAULT,
    "Qwen/Qwen2.5-0.5B-Instruct-GPTQ-Int4": WITH_DEFAULT,
    "Qwen/Qwen3-0.6B": KEEPS_LAST_THINKING,
    "Qwen/Qwen3-30B-A3B": KEEPS_LAST_THINKING,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": ZEPHYR,
}
