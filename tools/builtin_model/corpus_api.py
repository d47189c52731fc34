"""Facts about the HTTP routes of mlxrunner.

Knows: answers and the templates of their questions. Must not know: how the server is run
(corpus_server) or how a client uses it (corpus_client).
"""

from tools.builtin_model.corpus_facts import FactTemplate

ROUTES = (
    "The main endpoints are POST /v1/chat/completions, POST /v1/completions, POST /v1/responses, "
    "POST /v1/messages, POST /v1/embeddings, GET /v1/models, GET /v1/status, POST /v1/tokenize, "
    "POST /v1/detokenize and GET /health."
)
FACTS = (
    FactTemplate(
        weight=1.5,
        answers=(ROUTES,),
        to=(
            "{see|get|list|know|find} {all|all the|the|every} {endpoints|routes|urls|paths|api calls}",
        ),
        asks=(
            "{everything|all|list everything|tell me everything} {I can call|there is to call|I may request|that can be called} over http",
            "{overview|summary|list|table} of {the api|all endpoints|the routes|your urls|the http interface}",
            "{is there|where is} {an api reference|api documentation|a list of routes|an overview of the api}?",
            "what can I {get|post|request} from {the server|mlxrunner|you}?",
            "{which|what} {endpoints|routes|urls|paths|apis|requests|http endpoints|calls} {are there|do you have|does mlxrunner have|does the server have|does it offer|can I use|exist|are available|are supported|do you serve|do you know}?",
            "{list|show|name|enumerate|give me|print} {me|} {all|all the|the|your|every} {endpoints|endpoint|routes|urls|paths|api paths}{ of the server| of mlxrunner|}",
            "what {does|is} the api {look like|offer|of mlxrunner|have}?",
            "{endpoints|routes|api|the api|api routes}{?|}",
            "what can {I|a client} {request|call|ask for} over http?",
        ),
        about=("{the endpoints|the routes|the http api|the api|your api}",),
    ),
    FactTemplate(
        weight=1.5,
        answers=("Chat requests go to POST /v1/chat/completions.",),
        route_to=(
            "{chat|have a chat|have a conversation|talk to you|talk with the model|chat with the model|talk to the model}",
            "{send|post} {a chat|chat messages|a chat message|messages|a conversation|a list of messages}",
            "{get|make|request|ask for} {a chat completion|chat completions|an answer to a chat|a reply to my message}",
        ),
        asks=(
            "{which|what} {http path|path|url|endpoint|route} {accepts|takes|receives|handles|expects} {chats|conversations|messages|chat messages|dialogs|a messages list|a list of roles}?",
            "I am {building|writing|making} a {chatbot|chat client|chat program|messenger|bot}, {which url do I call|where do its messages go|which endpoint do I need|what path}?",
            "{where|to which path} does a {chatbot|chat client|chat program|frontend|ui} {post|send|connect|talk|write}{ to|}?",
            "{url|path|endpoint|route} {for|of} {chatting|the chat|messages|conversations|chat}?",
            "{what|which} is the chat {endpoint|route|url|path}?",
            "{where|to which url|to which path} {do|should|can} {chat requests|chat messages|messages|conversations} {go|be sent|be posted}?",
            "where {do|can|should} I {send|post} {chat messages|a chat request|my chat|my messages}?",
            "{chat endpoint|chat route|url for chat|chat completions}{?|}",
            "which {endpoint|route|url} is for {chat|chatting|conversations|messages}?",
            "what {does|is} /v1/chat/completions{ do| for|}?",
        ),
        about=("{the chat endpoint|chat completions|/v1/chat/completions}",),
    ),
    FactTemplate(
        weight=1.3,
        answers=("Plain text is continued by POST /v1/completions, with a `prompt` and no chat.",),
        route_to=(
            "{continue|complete|extend|finish} {a text|text|plain text|my text|a prompt|a raw prompt|a sentence|some text}{ without a chat|}",
            "{send|post} {a plain prompt|a raw prompt|a prompt without a chat template|a prompt instead of messages|text instead of messages}",
            "{get|make} {a text completion|a plain completion|a completion of a prompt|completions without chat}",
        ),
        asks=(
            "{is there|do you have} {something|a route|an endpoint|a url} {for|that takes} {bare prompts|a bare prompt|prompts without roles|text without messages|plain strings|raw strings|non chat prompts}?",
            "{no chat|no roles|no messages|without messages|without a chat template}, {just|only} {text|a prompt|a string|raw text}, {where does it go|which endpoint|how|which url}?",
            "{I want|let|can} the model {to|} {continue|carry on|go on with|finish|complete} {my sentence|a sentence|my paragraph|the text|what I wrote|a string}, {how|which url|where|over which endpoint}?",
            "which {route|endpoint} {simply|only|just} {continues|completes|extends|carries on} {text|a string|a sentence|what I send}?",
            "{what|which} is the {text completion|plain completion|legacy completion|prompt} {endpoint|route|url}?",
            "what {does|is} /v1/completions{ do| for|}?",
            "which {endpoint|route} {takes|accepts|wants} {a prompt|a raw prompt|plain text}?",
            "where do {plain prompts|raw prompts|text prompts} go?",
            "{can|does} {you|it|the server} {complete|continue|do} {plain text|raw text|raw prompts|a text|text completion}{ too|}?",
        ),
        about=("{/v1/completions|text completions|raw prompts|the completions endpoint}",),
    ),
    FactTemplate(
        weight=1.2,
        answers=("GET /v1/models lists the models that can be asked for.",),
        route_to=(
            "{list|see|get|show|find|fetch|enumerate} {the models|all models|available models|the list of models|the model list|the names of the models|which models are there}",
            "{find out|learn|see|know} {which model is loaded|what models there are|the name of the model|which models are served}",
        ),
        asks=(
            "{what|where|which url} do I {query|request|get|ask} to {learn|see|find|get|know} {the names of the models|which models are served|the model ids|the models|what models exist|the available models}?",
            "{which|what} {models|ids|model names} {may|can} {a client|I|my app} {ask for|request|choose|pick|select}?",
            "how {does|can} {a client|my app|the ui|a program} {find|discover|list|know|learn} {the models|which models it can use|the available models|model names}?",
            "{url|path|endpoint|route|address} {for|with|of} {the|a} {model list|list of models|models}?",
            "{what|which} {endpoint|route|url|path} {lists|shows|returns|gives} {the|all|available} models?",
            "what {does|is} /v1/models{ do| for| return|}?",
            "where {is|do I find|can I see} the {list of models|model list}?",
            "which model is {loaded|being served|running}{ right now|}?",
        ),
        about=("{/v1/models|the list of models|the models endpoint}",),
    ),
    FactTemplate(
        weight=1.2,
        answers=(
            "GET /v1/status tells what the server is doing: its state, its memory and its work.",
        ),
        route_to=(
            "{see|get|check|read|watch|know|ask for|look at} {the status|the state of the server|the server status|what the server does|how busy the server is|memory use|the memory usage|the load|how much memory is used|the progress of loading|if the model is loaded}",
            "monitor {the server|mlxrunner|the memory}",
        ),
        asks=(
            "{which|what} {url|path|endpoint|request} {says|shows|tells me|reports|reveals} {what the server is up to|how busy it is|what goes on inside|what the server works on|its current activity}?",
            "{what|which work} is {the server|mlxrunner|it} {doing|working on|up to|occupied with|busy with} {now|right now|just now|currently|today}{, where do I see it|, how can I see that|, which url shows it|}?",
            "{where|how} {do I|can I|could we} {check|view|read|see|get|follow|find out} {the activity of the server|how occupied it is|the state of the server|its activity|what it works on}{ over http|}?",
            "how do I {find out|see|know|check|learn} {whether|if} the server {is under load|is busy|has work|is idle|is loaded|is still working|has free memory|uses a lot of memory}?",
            "{where|how} {can|do|could} I {see|watch|look at|inspect|follow|find} {what the server is doing|what is going on|its memory|the current work|the load|the queue|how much work there is|running requests|its progress}?",
            "{how far|how much} {is|has} the {loading|model|model loading} {done|progressed|loaded}?",
            "{statistics|stats|metrics|memory use|queue length|server load}{?|}",
            "is {anything|something|a request} {running|going on|in progress|being worked on}{ right now| on the server|}?",
            "{what|which} is the status {endpoint|route|url|path}?",
            "what {does|is} /v1/status{ do| for| return| tell|}?",
            "{what|which} {endpoint|route} {tells|shows|reports} {the status|the state|memory|how busy you are|statistics}?",
            "how {much memory|many requests} {do you use|does the server use|are running|are waiting}?",
            "what is the {server|current} {status|state}?",
            "{is the server|are you} {busy|still loading|overloaded|working on something}?",
        ),
        about=("{/v1/status|the status endpoint|server status|monitoring}",),
    ),
    FactTemplate(
        weight=1.3,
        answers=("POST /v1/tokenize turns text into token ids.",),
        route_to=(
            "{tokenize|encode|split|tokenise} {a text|text|a string|my prompt|some text|a sentence|words}{ into tokens|}",
            "{get|see|know|compute|count|find} {the tokens|token ids|the token ids|the ids|how many tokens are in} {of|for|in} {a text|my prompt|a string|some text}",
            "{count|measure} {tokens|the tokens of a text|the length of a prompt in tokens}",
            "{turn|convert|change|translate} {text|a text|a string|my prompt|words} {into|to} {tokens|ids|token numbers|numbers}",
        ),
        asks=(
            "how can I {know|learn|see|compute|determine} the {number|count|amount} of tokens {in my text|of my prompt|in a string|in advance|before I send it|of a sentence}?",
            "{does|will} my prompt {fit|be too long}, how {do|can} I {count|measure} {it|its tokens|the tokens}?",
            "{how is|into which tokens is|into what is} {my text|a sentence|a prompt|this string} {split|cut|divided|broken up}?",
            "I {have|got|hold} {text|a string|a sentence|a paragraph} and {want|need|would like} {ids|tokens|numbers|its token ids}, {which call|where|how|which route}?",
            "{where|how} do I {get|find|obtain} {tokens|token ids|ids} for {a sentence|my text|this string|a paragraph}?",
            "{what|which} {endpoint|route|url|path} {tokenizes|counts tokens|encodes text|makes tokens|gives token ids}?",
            "what {does|is} /v1/tokenize{ do| for| return|}?",
            "how {many tokens|long} {has|is} my {text|prompt}{ in tokens|}?",
            "how does {tokenization|tokenizing|counting tokens} work{ here|}?",
        ),
        about=("{/v1/tokenize|tokenizing|token counting|the tokenize endpoint}",),
    ),
    FactTemplate(
        weight=1.3,
        answers=("POST /v1/detokenize turns token ids back into text.",),
        route_to=(
            "{detokenize|decode|detokenise} {ids|tokens|token ids|a list of tokens|numbers|a token list}{ to text|}",
            "{turn|convert|change|translate|transform} {ids|tokens|token ids|the ids|token numbers|a list of numbers} {into|to|back to|back into} {text|a text|a string|words}",
            "{get|see|read|recover|obtain} the {text|words|string} {of|for|from|behind} {token ids|some ids|tokens|ids}",
        ),
        asks=(
            "I {got|have|hold|received|only have} {[1, 2, 3]|[17, 4, 256]|some ids|a list of numbers|numbers|token numbers|integers} {from the tokenizer|from tokenize|from the server|here|}, {which call gives me text|what text is it|how do I decode them|how do I read them|which endpoint makes text of it}?",
            "{how|where} {do|does|can} {ids|tokens|token ids|numbers} {become|turn into|get back to|change into} {text|words|letters|a string|readable text}{ again|}?",
            "{the way|and|now} {back|the other way|in reverse}, from {tokens|ids|numbers} to {text|letters|words|a string}?",
            "what {undoes|reverses|inverts} {tokenize|tokenization|/v1/tokenize|the encoding}?",
            "{what|which} {endpoint|route|url|path} {detokenizes|decodes ids|decodes tokens|makes text from ids|undoes tokenize|reverses tokenize}?",
            "what {does|is} /v1/detokenize{ do| for| return|}?",
            "what is the {opposite|reverse|inverse} of {tokenize|/v1/tokenize|tokenizing}?",
            "I have {token ids|ids|tokens|some token ids}, {how do I get text|what do they mean|how do I read them|how do they become text}?",
        ),
        about=("{/v1/detokenize|detokenizing|decoding ids|the detokenize endpoint}",),
    ),
    FactTemplate(
        weight=1.2,
        answers=("GET /health answers when the server is up.",),
        route_to=(
            "{check|see|test|know|find out} {if|whether|that} {the server|mlxrunner|it} is {alive|up|healthy|running|ready|there|well}",
            "{do|make|run|write} a {health check|liveness check|liveness probe|readiness probe|heartbeat}",
            "{ping|probe} {the server|mlxrunner}",
        ),
        asks=(
            "{our|my|the} {monitoring|monitor|watchdog|proxy|kubernetes|cron job|script|orchestrator} {wants|needs|asks for|would like} {a url|an endpoint|something|a route} to {poll|probe|ping|check|watch}{ for liveness| for health|}",
            "{what|which url} {can|should|could} {a proxy|nginx|a watchdog|monitoring|kubernetes|docker|a cron job} {ping|poll|probe|ask|check|call}?",
            "{is|are} {the server|you} {alive|up|still there|running|healthy|reachable}, how do I {check|know|test|see}{ that|}?",
            "{liveness|readiness|health|heartbeat} {probe|url|check|endpoint|path}?",
            "{what|which} is the health {endpoint|route|url|check|path}?",
            "what {does|is} /health{ do| for| return|}?",
            "{is there|do you have} a {health check|health endpoint|heartbeat|liveness probe}?",
            "how {does|can} {docker|kubernetes|my monitor|a script|systemd} {know|see|check} {that|if} {the server|it|mlxrunner} {is alive|works|is up|is healthy}?",
        ),
        about=("{/health|health checks|the health endpoint}",),
    ),
    FactTemplate(
        answers=(
            "POST /completion is the protocol of Ollama's MLX runner. Clients of llama.cpp use "
            "POST /v1/completions or POST /v1/chat/completions.",
        ),
        asks=(
            "what {does|is} {/completion|post /completion|the /completion endpoint}{ do| for|}?",
            "{do you|does mlxrunner|does it} {support|speak|offer|have} {the llama.cpp api|a llama.cpp endpoint|llama.cpp clients|/completion}?",
            "can I use a llama.cpp client{ with mlxrunner|}?",
            "is there a route {in the style of|like|compatible with} llama.cpp?",
        ),
        about=("{/completion|the llama.cpp endpoint}",),
    ),
)
