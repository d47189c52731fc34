"""Facts about using mlxrunner as a client: streaming, caching, SDKs, names, options.

Knows: answers and the templates of their questions. Must not know: the list of routes (corpus_api).
"""

from tools.builtin_model.corpus_facts import FactTemplate

CURL = (
    "Here is one: `curl http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: "
    'application/json\' -d \'{"model": "builtin", "messages": [{"role": "user", "content": '
    '"Hello"}]}\'`'
)
PYTHON = (
    'Like this: `client = OpenAI(base_url="http://127.0.0.1:8080/v1", api_key="any")`, then '
    '`client.chat.completions.create(model="builtin", messages=[...])`.'
)

FACTS = (
    FactTemplate(
        weight=1.8,
        answers=(
            'Put `"stream": true` into the request. The answer then arrives piece by piece, as '
            "server-sent events.",
        ),
        to=(
            "{stream|stream the answer|stream answers|get a stream|use streaming|enable streaming|turn on streaming|switch on streaming|stream tokens|stream a reply|activate streaming}",
            "{get|receive|see|read|show|have} {the tokens|tokens|the answer|answers|the output|the text|words|a reply} {one by one|as they come|as it comes|while it is made|live|piece by piece|in pieces|bit by bit|token by token|as a stream|immediately|in real time|as it is generated}",
        ),
        asks=(
            "I {would rather|do not want to|don't want to|hate to|cannot} {wait|wait for the end|wait so long|sit and wait}{ for the whole reply| until it is finished|}, {can it come in pieces|can I see it earlier|can it stream|can the answer come bit by bit}?",
            "how do I {consume|read|process|show|print|handle} {the reply|the answer|output|tokens} {as it gets produced|as it arrives|while it is generated|before it is complete|chunk by chunk|in chunks|incrementally}?",
            "{can|could|will|does} {the answer|the reply|the output|text|it} {come|arrive|appear|show up|be sent|trickle in} {in pieces|bit by bit|in chunks|gradually|as it is made|early|piece by piece|live|one token at a time}?",
            "{like|the way} {chatgpt|other chats|typing} {does|do|shows it}, {letter by letter|the text appearing slowly|typing live}, {how|is that possible|can you}?",
            "{typing|typewriter|live|incremental|partial} {effect|output|answers|results|replies}?",
            "what do I {add|set|change} {in|to} {the|my} {request|json|body} {for|to get} {streaming|a stream|events|chunks|live output}?",
            "{do you|does it|does mlxrunner|does the server|can you|can it} {stream|support streaming|stream answers|stream tokens|send events|support sse|stream the output}?",
            "how does {streaming|sse|a stream|stream mode} work{ here|}?",
            "{is streaming|are streams|is sse|are server-sent events} {supported|possible|available}?",
            "{which|what} {option|field|setting|flag} {is for streaming|streams|turns on streaming|makes it stream}?",
            "{must|do} I {wait for|have to wait for} the {whole|full|complete} answer?",
            "{streaming|sse|stream|server-sent events}{?|}",
        ),
        about=("{streaming|server-sent events|sse|the stream option|streamed answers}",),
    ),
    FactTemplate(
        weight=1.8,
        answers=(
            "The prefix cache keeps the KV of earlier prompts. When a new prompt begins the same "
            "way, that part is not evaluated again, so the answer starts sooner.",
        ),
        asks=(
            "{why|how come} {is|was|are} {my second|the second|the next|a later|the following|every later} {message|turn|answer|request|question}{s|} {in a chat|of a conversation|in a long chat|} {answered|so much|much|} {sooner|faster|quicker|earlier}?",
            "{does|must|will} {it|the server|mlxrunner|the model} {have to|} {read|process|evaluate|compute|go through} {the whole chat|the entire conversation|the same prompt|all messages|the long system prompt|old messages} {again|each turn|every turn|anew|twice|once more}?",
            "{is|are} {the same prompt|repeated prompts|long system prompts|shared beginnings|old turns} {reused|cached|faster|skipped|kept|evaluated twice}?",
            "{what|which} {advantage|benefit|gain|use|good} {does|is there in} {the cache|the prefix cache|prompt caching|caching}{ have| bring| give me|}?",
            "I {send|use|repeat} {the same|a long|an identical} {beginning|system prompt|document|prompt|start} {every time|again and again|each time|often}, {is that slow|does that cost time|is it cached|is it read again}?",
            "how {are|do} {long chats|long conversations|repeated prompts} {kept fast|stay fast|get faster|made cheap}?",
            "what {does|is} {the|a|your} {prefix cache|prompt cache|kv cache|cache}{ do| for| good for|}?",
            "how does {the|your} {prefix cache|prompt cache|cache|caching|prompt caching} work?",
            "{why|how come} is the second {answer|request|question|turn|time} {so much|} {faster|quicker|so fast}?",
            "{do you|does mlxrunner|does it|does the server} {cache|remember|reuse|keep} {prompts|anything|the prompt|earlier prompts|the kv|results}?",
            "what {happens|is saved} when {prompts|two prompts|two requests|requests} {share|have} {a prefix|the same beginning|the same start|a common beginning}?",
            "{why|what for} {do you have|is there|have} a {prefix cache|cache|prompt cache}?",
            "{must|does} {the server|it} {evaluate|compute|process|read} {a long prompt|my prompt|the whole prompt|the history|everything} {every time|each time|again and again}?",
            "how does mlxrunner {save|avoid} {work|time|computation} {for|with} {long prompts|long chats|conversations}?",
            "what is {kept|cached|stored} {between|from one to the next of} {requests|prompts}?",
        ),
        to=("{use|understand|benefit from|explain} the {prefix cache|prompt cache|cache}",),
        about=(
            "{the prefix cache|prefix caching|the prompt cache|prompt caching|the cache|the kv cache}",
        ),
    ),
    FactTemplate(
        weight=1.6,
        answers=("Use the OpenAI SDK with base_url http://127.0.0.1:8080/v1 and any api_key.",),
        to=(
            "{use|connect|point|configure|set up} {the openai sdk|the openai client|openai's library|the openai library|an openai client|the python sdk|the openai package|my openai app}{ with this server| with mlxrunner| to mlxrunner| here|}",
            "{connect|set up|configure} {my app|my client|a client|langchain|an existing app|open webui|my editor}{ to mlxrunner| to the server|}",
            "{set|choose|configure|fill in} the {base_url|base url|api base|openai base url}",
        ),
        asks=(
            "I {use|have|work with|love|already use} the {openai library|openai sdk|official openai client|python sdk|official sdk|openai package}, {what url do I give it|what do I change|how do I point it here|which address|what do I set}?",
            "{what|which} {url|address|value} {goes|belongs|do I write|do I pass|do I enter} {in|into|for|as} {base_url|OpenAI(base_url=...)|the base url|the client constructor|OPENAI_BASE_URL}?",
            "{how|where} do I {point|direct|aim|connect} {the openai client|my openai code|the sdk|openai tools|existing openai apps}?",
            "{can|could|will} {my|an|any} {existing|old|} {openai|gpt|chatgpt} {code|script|program|app|client} {work|talk to you|be used|connect} {here|with you|with mlxrunner|unchanged|too}?",
            "{does|can|will} {it|mlxrunner|the server|this} {work|be used|run} with {the openai sdk|openai clients|the openai library|openai's python package|my openai code|openai tools}?",
            "{what|which} {base_url|base url|api base|url} {do I|should I|must I} {use|set|need|give|enter|type}{ for the openai sdk| for the client| for my client|}?",
            "what is {the|your} {base_url|base url|openai base url|api url}{ of the server| for the openai client|}?",
            "{is it|are you|is mlxrunner|is the api} {compatible with openai|openai compatible|like openai|compatible with the openai sdk}?",
            "{base_url|base url}{?|}",
            "{which|what} {address|url} do I {give|pass} to {the sdk|the openai client|my client}?",
        ),
        about=("{the openai sdk|openai compatibility|the base_url|openai clients}",),
    ),
    FactTemplate(
        answers=(
            "Any api_key will do, unless the server was started with `--api-keys`. Then use a key made "
            "by `mlxrunner key NAME`.",
        ),
        asks=(
            "must I {sign up|register|pay|log in|make an account|have a key}{ for a key| first| to use you|}?",
            "{does|will} {it|the server|the api} {check|verify|want|require|reject} {my key|keys|an api key|a wrong key|the api_key}?",
            "is {the server|the api|it} {open without a key|usable without a key|password protected}?",
            "{do I need|must I have|is there|does it need|does the server want|do you check} {an api key|a key|a password|a token|an api_key|authentication|an account|a login}?",
            "{what|which} {api key|api_key|key|password} {do I|should I|must I} {use|give|set|enter|type|need}?",
            "where do I get {an api key|a key|an api_key}?",
            "{api_key|the key|which key}{?|}",
        ),
        about=("{the api key in my client|the api_key field|the key that a client sends}",),
    ),
    FactTemplate(
        weight=1.5,
        answers=('My name in requests is builtin: send `"model": "builtin"`.',),
        asks=(
            'in {the|my|a} {request|request body|json|body|payload|call}, what {goes after|comes after|do I put after|stands behind|is written at} {"model"|"model":|model|the word model}?',
            "{which|what} {model|name|id|string} {do I|must I|should I|shall I} {request|ask for|specify|choose|name|pass} {to get you|for you|to use you|in json|in the call|to reach this model|for the built-in one}?",
            "{under|by} {which|what} name {can|do|may} I {call|reach|request|use|find} you{ in the api| over http|}?",
            "model={what|which|?|???}",
            '{what|which} {text|value|word|entry} {must|has to|needs to} {stand|be|appear|go} {under|behind|at|in} {model|"model"|the key model|the model entry} {of a request|in my payload|in the request body|in the post body|of the call}{ for this model| to get you| to talk to you|}?',
            'what {does|must|will} {the model parameter|"model"|the model entry|the model field} {need to be|contain|have to be|be set to|look like|hold}{ for you| for the built-in model| if I want you| in the json|}?',
            "I {write|build|send} a {request|json body|payload} by hand, {which model name belongs there|what is the value of model|what do I write for the model|how do I name you}?",
            'what {is|should be|must be} {in|inside|the content of|the value of} the {model|"model"} {field|parameter|key|entry|property}?',
            "{what|which} model name {do I|should I|must I|can I} {use|send|give|set|put|write|type|enter}{ in the request| in requests| to reach you| to talk to you|}?",
            "what {is|would be} {your|the} {model name|model id|name in requests|name in the api|id}{ here|}?",
            '{what|which} {value|name|string|word} {goes|belongs|do I put|should I put|comes} {in|into} {the model field|the "model" field|"model"|the model parameter|the field model}?',
            "how {do I|should I|can I|do clients} {call|address|name|refer to} you in {a request|requests|the api|json|my code|the sdk}?",
            "{model name|model id|the model field|the model parameter}{?|}",
            "under which {name|id} {are you|is the built-in model} {served|listed|known|found}?",
            'what do I {set|write|fill in|give} for {model|the model|"model"}{ in my request|}?',
        ),
        about=("{the model name|the model field|your model id|the model parameter}",),
    ),
    FactTemplate(
        answers=(CURL,),
        asks=(
            "{give|show|write|send} me {a|an} {curl example|curl command|example request|example with curl|sample request|curl call}",
            "how {do|can|would} I {call|use|ask|reach} {you|the server|the api|mlxrunner} with curl?",
            "what does a {request|chat request|curl command} look like?",
            "{curl|curl example|example request}{?|}",
        ),
    ),
    FactTemplate(
        answers=(PYTHON,),
        asks=(
            "{give|show|write} me {a|an} {python example|example in python|example with the openai sdk|openai example|sample in python}",
            "how {do|can|would} I {call|use|ask|reach} {you|the server|the api|mlxrunner} {from|in|with} python?",
            "what does {the python code|the python|python code for this|the client code} look like?",
            "{python|python example}{?|}",
        ),
    ),
    FactTemplate(
        answers=(
            "Set `temperature`, `top_p`, `seed`, `max_tokens` or `stop` in the request. "
            "Without them I answer with the most likely words.",
        ),
        to=(
            "{set|change|choose|lower|raise} {the temperature|top_p|the seed|the sampling|max_tokens|sampling options|a stop string|a stop word}",
            "{limit|cut|shorten} the {length of the answer|number of tokens|answer}",
            "get {the same answer every time|more random answers|more creative answers|a repeatable answer}",
        ),
        asks=(
            "{which|what} {sampling options|sampling parameters|options|parameters|settings} {are there|do you take|can I set|does a request have}?",
            "what {does|is} {temperature|top_p|max_tokens|the seed}{ do| for|}?",
        ),
        about=("{temperature|sampling|top_p|max_tokens|the seed|stop strings|sampling options}",),
    ),
)
