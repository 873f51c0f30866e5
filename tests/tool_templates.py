"""Chat templates that know tools, built as those of the Qwen families: calls as JSON, or as tagged parameters."""

__all__ = ["JSON_CALLS", "TAGGED_CALLS"]

_TURNS = """
{%- for message in messages %}
    {%- if message.role in ('system', 'user') %}
        {%- if not (tools and loop.first and message.role == 'system') %}
            {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + (message.content or '') }}
        {%- for made in message.tool_calls or [] %}
            {%- set called = made.function %}
            {%- if message.content or not loop.first %}{{- '\\n' }}{%- endif %}
            CALL
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
_JSON_CALL = """{{- '<tool_call>\\n{"name": "' + called.name + '", "arguments": ' }}
            {{- called.arguments if called.arguments is string else called.arguments | tojson }}
            {{- '}\\n</tool_call>' }}"""
_TAGGED_CALL = """{{- '<tool_call>\\n<function=' + called.name + '>\\n' }}
            {%- for name, value in called.arguments | items %}
                {{- '<parameter=' + name + '>\\n' }}
                {%- if value is mapping or (value is sequence and value is not string) %}
                    {{- value | tojson }}
                {%- else %}
                    {{- value | string }}
                {%- endif %}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}"""
_TOOLS = """{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '\\n</tools>' }}"""

# The system's text, then the tools.
JSON_CALLS = (
    """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\nThese functions can be called:\\n<tools>' }}"""
    + _TOOLS
    + """{{- '\\nWrite a call as JSON.<|im_end|>\\n' }}
{%- endif %}"""
    + _TURNS.replace("CALL", _JSON_CALL)
)

# The tools, then the system's text.
TAGGED_CALLS = (
    """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\nThese functions can be called:\\n<tools>' }}"""
    + _TOOLS
    + """{{- '\\nWrite a call as tagged parameters.' }}
    {%- if messages[0].role == 'system' %}{{- '\\n\\n' + messages[0].content }}{%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}"""
    + _TURNS.replace("CALL", _TAGGED_CALL)
)
