"""Facts about running mlxrunner: what it is, where it runs, how to start and configure it.

Knows: answers and the templates of their questions. Must not know: HTTP routes (corpus_api).
"""

from tools.builtin_model.corpus_facts import FactTemplate

LOAD = (
    "Give the server a folder: `.venv/bin/mlxrunner serve /path/to/model`. "
    "The folder holds config.json, tokenizer.json and the safetensors weights."
)

FACTS = (
    FactTemplate(
        weight=1.6,
        answers=(
            "mlxrunner is a small server for language models. It runs them with Apple's MLX and "
            "speaks the OpenAI API.",
        ),
        asks=(
            "{what|which} {need|task|job|use case} does {mlxrunner|this project|this server} {serve|fill|cover|address|have}?",
            "what's {mlxrunner|this|this repository|this program|this server} {all about|good for|about|for|actually doing}?",
            "{who needs|who uses|what do people use} {mlxrunner|this server}{ for|}?",
            "{in a nutshell|in short|in a few words|in two words|in plain words}, what is {mlxrunner|this project|this program|this server}?",
            "{could|can} {you|somebody} {sum up|summarize|explain} {mlxrunner|this project|the project|this software}{ for a beginner| in a line| for me|}?",
            "what {happens|do I get} when I {run|start|install|launch} {mlxrunner|this}?",
            "what is {mlxrunner|mlx runner|mlx-runner|this project|this server|this program|this software|this thing|all this}{ exactly|}?",
            "what {does|can|will} {mlxrunner|this project|this server|this program|this tool|this software} do{ for me|}?",
            "what is {mlxrunner|this project|this repository|this code} {for|about|good for|made for}?",
            "{what is|what would be} the {purpose|point|idea|use} of {mlxrunner|this project|this server|this program}?",
            "{explain|describe|summarize} {mlxrunner|this project|this program|this repository}{ to me| briefly| in a sentence| shortly|}",
            "{why|when} would {I|someone|anybody} {use|want|need|install} {mlxrunner|this project|this}?",
            "{tell me|say something|I want to know more} about {mlxrunner|this project|this software|the project}",
            "{mlxrunner|mlx runner}{?|}",
            "what {am I|are we} {looking at|running|using|talking to} here?",
            "what {kind|sort} of {program|software|project|tool|thing} is {mlxrunner|this}?",
            "give me {a short|an|a quick|a brief} {overview|summary|description|explanation} of {mlxrunner|this project|this repo}",
            "I {just|only|} {found|installed|downloaded|discovered|got} {mlxrunner|this|this repository|this project}, what {is it|does it do|is it for|can it do}?",
            "{never heard of|new to|I am new to|I do not know} mlxrunner, what is it?",
        ),
    ),
    FactTemplate(
        weight=2.2,
        answers=(LOAD,),
        to=(
            "{load|run|serve|use|start|try|open|host|launch|switch to|change to|get} {another|a different|a bigger|a larger|a real|my own|a new|a better|some other|an other|a proper|a local} $model",
            "{load|run|serve|use|start|try|host|launch} {a llama model|a qwen model|a gemma folder|a mistral folder|a hugging face folder|a model I downloaded|a finetune|my fine-tuned model|a qwen checkpoint|a llama folder|the model in my folder}",
            "{load|serve|use|run|start with|point it at} {a model folder|a folder with a model|a folder|my weights|other weights|weights from my disk|a model on my disk|downloaded weights|safetensors files}",
            "{replace|swap|change|exchange|switch} {the model|you|this model|the built-in model|models}{ for another one| for a bigger one|}",
            "make {mlxrunner|the server|it} {load|serve|use|run} {another $model|my model|my folder|a folder of weights}",
            "{choose|pick|select|set|configure} {the|which|another} model{ to serve| that is served|}",
        ),
        asks=(
            "{there is|there's|I keep|I got|we have|I own} {a qwen|a gemma|a mistral|a llama|another|a bigger|a quantized} {model|checkpoint|folder} {on my disk|in my home|on this machine|on my drive|in a folder|in my downloads}, {how|can it be served|can you take it|how do I bring it up|what do I type|how would it be started|which command}?",
            "{is this|are you} {the only model|all|all there is|everything}, or can {I|you|it} {have|load|take|plug in|swap in|bring in} {another|something else|something bigger|a larger one|something stronger}?",
            "{what|which} {argument|parameter|option|path} does {serve|the serve command|mlxrunner serve} {take|need|want|expect}?",
            "{does|will} {mlxrunner|it|the server} {accept|read|take|open} {hugging face folders|safetensors|hf checkpoints|my finetuned weights|a quantized model|weights of my own}?",
            "{weights|model files} {in my folder|on disk|in a directory}, how {do they get|are they} {served|loaded|used}?",
            "which {line|words} do I {type|enter} {for|to serve} {another|a different|my} {model|checkpoint}?",
            "{what|which} {command|line} {loads|serves|starts|runs} {another|a different|my own|a bigger} model?",
            "{how does|where does} {one|mlxrunner|the server} {load|read|open|take} {a folder|a local model|its model|its weights}{ from disk|}?",
            "can {mlxrunner|the server|you|it} {serve|load|run|use|work with} {other|bigger|real|different|more} models{ too| as well|}?",
            "{I have|I've got|there is|I downloaded} a {model|llama model|qwen model|bigger model|folder with weights}{ here| on my disk| on my computer|}, {how do I use it|how can I serve it|how is it loaded|what now|can you run it|how do I start it}?",
            "{which|what} {models|other models|kind of models|files} can {I|mlxrunner|it|the server} {load|serve|run|use}?",
            "you are too {small|dumb|limited|simple|weak}, {give me|I want|how do I get|can I have} a {better|bigger|real|smarter} model",
            "where do I {put|place|store|save} {my|the|a} model{ files| folder| weights|}?",
        ),
        about=(
            "{loading|serving|using|running} {another model|other models|my own model|bigger models}",
        ),
    ),
    FactTemplate(
        answers=(
            "Run `make serve`, or `.venv/bin/mlxrunner serve`. With no model named, the server "
            "starts with me, the built-in model.",
        ),
        to=(
            "{start|launch|boot|run|bring up|fire up} {the server|mlxrunner|this server|the program|you}{ again| on my machine|}",
            "{get|have} {the server|mlxrunner} {running|started|up and running|going}",
        ),
        asks=(
            "{what|which} {command|line} {starts|launches|runs} {the server|mlxrunner}?",
            "how is {the server|mlxrunner} started?",
            "{how do I|how to} get started{ with mlxrunner|}?",
        ),
        about=("{make serve|starting the server|the serve command}",),
    ),
    FactTemplate(
        weight=1.3,
        answers=("Press Ctrl-C in the terminal where the server runs. It stops cleanly.",),
        to=(
            "{stop|quit|end|kill|close|exit|terminate|halt|turn off|switch off|interrupt} {the server|mlxrunner|this server|the program|it|the process|everything|you}",
            "make {the server|mlxrunner|it} {stop|quit|end|exit}",
            "{get out of|leave} {the server|mlxrunner|it}",
            "{shut|switch|turn|close|power} {everything|it|mlxrunner|the program|this|the server} {down|off}{ again| for the night| properly|}",
        ),
        asks=(
            "{please |}{stop|shut down|quit|exit|kill} the {server|process|service}",
            "{my work is done|the demo is over|I have my results|I go home}, {what ends it|how do I shut down|how is it switched off|how do I turn it off|what do I press}?",
            "how do I {shut|switch|turn} {it|everything|mlxrunner|this program|the server} {down|off} {when|once|after|as soon as} {my work is done|the demo is over|I do not need it|everybody has gone home|the tests are through}?",
            "the server {blocks|holds|fills|keeps|has} my {terminal|shell|console|window}, how {do|can} I {get it back|stop it|end it|leave|quit}?",
            "what do I press to {stop|end|quit|leave|exit|shut down}{ it| the server| mlxrunner|}?",
            "how {do|can|should} {I|we|one} {end|stop|quit|exit|kill|close|turn off} {this|it|all this|everything|it all} {after work|once I no longer need it|again|later|in the evening|cleanly|properly}?",
            "{once|after|as soon as} I {am through|have what I need|no longer need it|have seen enough}, how {do I|can I|should I} {end|stop|quit|close|kill|exit|turn off} {it|this|the server|everything|the program}?",
            "{does|will} {ctrl-c|control c|ctrl c|ctrl-d|escape} {stop|end|quit|kill|hurt} {the server|it|mlxrunner|anything}?",
            "{enough|that's enough|I'm finished|work is over|I no longer need it}, how {is|do I get} the server {stopped|down|off|ended}?",
            "how {do|can|should} I {shut|take|bring|power} {mlxrunner|the server|it|the service} {down|off}{ cleanly| properly| safely|}?",
            "{what|which} {key|keys|command|button} {stops|ends|quits|kills|closes} {the server|mlxrunner|it|you}?",
            "how {is|does} {the server|mlxrunner} {stopped|ended|stop|end|turned off}?",
            "the server is {still|} running, how {do|can} I {stop|end|quit} it?",
            "I am {done|ready|through} {with the server|with you|for today}, how {do|can} I {stop|close|end|quit|exit} {it|the server|everything}?",
        ),
        about=("{stopping|quitting|ending} the server",),
    ),
    FactTemplate(
        weight=1.4,
        answers=(
            "The default port is 8080. Another one is set with `--port`, such as `--port 9000`.",
        ),
        to=(
            "{change|set|choose|pick|configure|use} {the|another|a different|some other} port{ number|}",
            "{run|start|serve} {the server|mlxrunner|it} on {another|a different|some other} port",
            "{find out|know|learn} {the port|which port it uses|the port number}",
        ),
        asks=(
            "{where|at which number|at what port} {does|will} the {server|service} {listen|wait|answer}{ without options| by default|, the port I mean|}?",
            "{with no|without} {options|arguments|flags|settings}, {what|which} port {is it|is taken|is used|will it be}?",
            "port {already|is} {in use|taken|occupied}, {what now|how do I choose another|can I change it}?",
            "{which|what} port {number|} do I {open|put|type} in my {browser|client|config|firewall}?",
            "is {8000|3000|5000|80|8081|9000} the {port|default port|right port}?",
            "{what|which} port {do you|does it|does the server|does mlxrunner|will it|is it going to} {use|listen on|run on|serve on|open|take}{ by default| normally| usually|}?",
            "what is the {default port|port|standard port|port number|usual port}{ of the server| of mlxrunner| here|}?",
            "on {which|what} port {is|does|can I find|do I find|do I reach|will I find} {the server|mlxrunner|it}{ running| listening| run| listen|}?",
            "{port|port number|default port|the port}{?|}",
            "{is|does} {the server|it|mlxrunner} {on|use|listen on} port {8000|8080|80|3000|5000|11434}?",
            "{which|what} port should {I|my client|my app} {connect to|use|open}?",
        ),
        about=("the {port|default port|port number}",),
    ),
    FactTemplate(
        weight=1.3,
        answers=(
            "The server listens on 127.0.0.1, so only this computer can reach it. "
            "Use `--host` for another address, together with `--api-keys`.",
        ),
        to=(
            "{reach|use|open|access} the server from {another|a different} {computer|machine|device|host}",
            "{change|set|choose|configure} the {host|address|interface|ip}{ of the server|}",
            "{make|have} the server {reachable|visible|open} {from outside|on my network|to others}",
        ),
        asks=(
            "{is|will} {it|the server|mlxrunner} {be|} {exposed|open|public|shared} {to the internet|to the world|to my office|in my lan|on the local network|to everybody|to others}?",
            "{who|which machines|which computers} can {reach|access|connect to|talk to} {it|the server|mlxrunner}?",
            "{only|just} {localhost|this machine|local}, or {other machines|the whole network|everyone} too?",
            "{where|on which interface|on which address|to which ip} {does|will} {it|the server|mlxrunner} {bind|listen|attach}{ by default|}?",
            "what {address|ip|interface} is the {default|standard|usual one}?",
            "{0.0.0.0 or 127.0.0.1|localhost or all interfaces}?",
            "{what|which} {host|ip|ip address|interface|address} {do you|does it|does the server|does mlxrunner} {use|listen on|run on|open}{ by default|}?",
            "what is the {default host|host|ip address|host name|default address|default interface}{ of the server|}?",
            "{host|default host|ip address|the host}{?|}",
            "on which {host|ip|interface|address} {does it|does the server|will mlxrunner} {listen|run}?",
            "{is|will} the server {be|} {reachable|visible|open|accessible} {from outside|from the internet|on my network|for other machines}?",
            "can {others|other people|my phone|another machine|somebody else} {reach|use|see|connect to} {the server|it|mlxrunner}?",
        ),
        about=("the {host|default host|listening address|ip address}",),
    ),
    FactTemplate(
        weight=1.3,
        answers=(
            "Yes, mlxrunner runs on a Mac with Apple silicon. MLX uses the GPU there through Metal.",
        ),
        to=(
            "{run|use|install|start} {mlxrunner|it|this|the server} on {my|a} {mac|macbook|mac mini|imac|mac studio|apple computer}",
            "{use|run on} {the gpu of my mac|apple silicon|metal|my apple gpu|an m1|an m2|an m3|an m4}",
        ),
        asks=(
            "{would|will|is|could} {a mac mini|my mac|an imac|a macbook air|an m1 mac|a mac studio|an apple laptop} {do|be ok|be enough|be fine|work|suffice|cut it}{ for mlxrunner| with apple silicon|}?",
            "{any|is there} {support for|acceleration on} {macs|apple silicon|m1|m2|m3|m4|metal|the mac gpu}?",
            "{mac|macbook|m1|m2|m3|m4|apple silicon|macos}{?|}",
            "{will|does|can} {it|this|mlxrunner} {run|work|be used|go} on {my|our|an} {m1|m2|m3|m4|apple|macbook} {machine|laptop|chip|computer|pro|air}?",
            "{does|will|can} $it {run|work|start} on {a mac|macs|macos|mac os|apple silicon|my mac|a macbook|my macbook|osx|an m1|an m3 chip|apple chips|apple computers}?",
            "{do you|does $it} {support|use|know} {metal|macs|macos|apple silicon|the apple gpu}?",
            "{is|are} {a mac|macs|apple silicon|macos|metal} {supported|ok|fine|enough}?",
            "I {have|own|use|am on} a {mac|macbook|macbook pro|mac mini|mac studio}, {does it work|will it run|is that fine|can I use it|is it fast}?",
        ),
        about=("{metal|macos|mac support|apple silicon}",),
    ),
    FactTemplate(
        weight=1.5,
        answers=(
            "Yes, mlxrunner runs on Linux with an NVIDIA GPU. Start it with `CUDA=1 make serve`.",
        ),
        to=(
            "{use|run on|enable|switch on|turn on|take advantage of} {my gpu|an nvidia gpu|a gpu|cuda|my nvidia card|the graphics card|a geforce|a gpu on linux|my h100|an a100}",
            "{run|start|serve} {mlxrunner|it|the server} {with cuda|on cuda|with an nvidia gpu|on the gpu|on my graphics card|with my nvidia card|on a linux machine with a gpu}",
        ),
        asks=(
            "how do I {get|make|let} {it|mlxrunner|the server} {to use|use|run on} {my|the|our} {geforce|rtx|nvidia card|gpu|a100|h100|4090|graphics card|cuda device}{ in my linux box| on linux| on ubuntu| in the server room|}?",
            "{there is|there's|we have|my machine has|my pc has|the box has} {a geforce|an nvidia gpu|an rtx 3090|an a100|a graphics card|a gpu}, {can it help|is it of use|will it be used|can mlxrunner use it|how is it used}?",
            "{is|will} {cuda|my gpu|the nvidia gpu|the graphics card} {used|be used|found|needed}{ on linux| automatically|}?",
            "{the|our|my} {desktop|tower|gaming pc|computer|box|server|rig|linux pc} {contains|comes with|is equipped with|sports|runs} {an nvidia card|a geforce|a gtx 1660|a 4070|a quadro|two a100s|nvidia hardware|a graphics card from nvidia} {under linux|with debian|and fedora|and arch linux|}, {does the server benefit|does it get used|will that be used|would it be faster|what do I have to type}?",
            "{linux|debian|fedora|arch} {with|plus|and} {an rtx 3080|a geforce|an nvidia card|an nvidia gpu|a gtx card|rtx}{, does that work|, is it supported|, how|?|}",
            "{geforce|rtx|4090|3090|a100|h100|cuda 13|nvidia gpu}{?| support?}",
            "{does|will|can} $it {run|work|start} {on|with} {nvidia|an nvidia gpu|cuda|a geforce card|nvidia cards|linux with cuda|a linux gpu|gpus from nvidia|an rtx|rtx cards}?",
            "{do you|does $it} {support|use|know} {cuda|nvidia|nvidia gpus|nvidia cards|graphics cards|gpus|rtx}?",
            "{is|are} {cuda|nvidia|nvidia gpus|graphics cards} {supported|usable|ok}?",
            "I {have|own|use} {an nvidia|a geforce|an rtx 4090|an rtx 3060|a cuda|a quadro|an h100} {gpu|card|machine|graphics card}, {does it work|how do I use it|can it be used|is it used|what do I type}?",
            "{gpu|cuda|nvidia}{ on linux| on ubuntu|}?",
        ),
        about=("{cuda|cuda support|nvidia support|gpus}",),
    ),
    FactTemplate(
        answers=(
            "Yes, mlxrunner runs on Linux, on the CPU alone. No GPU is needed, but one is faster.",
        ),
        to=(
            "{run|use|start|install} {mlxrunner|it|the server} {without a gpu|on the cpu|on a cpu only machine|on plain linux|on linux|on a server without a gpu}",
        ),
        asks=(
            "{does|will|can} $it {run|work|start} {on linux|on the cpu|on a cpu|without a gpu|without a graphics card|on debian|on ubuntu|on fedora|on a linux box|on a linux laptop}?",
            "{do I need|must I have|is it necessary to have|does it need|do you need} a {gpu|graphics card|video card}?",
            "{is|are} {linux|cpus|linux machines} supported?",
            "is a cpu enough?",
        ),
        about=("{linux|linux support|the cpu backend|cpu only machines}",),
    ),
    FactTemplate(
        answers=(
            "It runs on a Mac with Metal, on Linux with the CPU, and on Linux with NVIDIA GPUs. "
            "Only Linux with an x86-64 CPU is tested.",
        ),
        asks=(
            "{which|what} {platforms|systems|operating systems|computers|machines|hardware|os|devices} {are supported|does it support|does it run on|does mlxrunner run on|can I use|do I need|is needed|is supported}?",
            "{where|on what|on which hardware|on which systems} {does|can} $it run?",
            "what {computer|hardware|machine} do I need{ for mlxrunner|}?",
            "does it run on windows?",
        ),
        about=("{the supported systems|supported hardware|platforms|system requirements}",),
    ),
    FactTemplate(
        weight=1.3,
        answers=("mlxrunner is free software under the MIT license.",),
        asks=(
            "{is|are} the {source|code|sources|program} {free|allowed|ok|permitted} to {use|copy|share|reuse|sell|publish}{ in a product| at my company| commercially|}?",
            "what {am I allowed|may I|are we permitted|is one free} to do with {the code|the source|mlxrunner|this software}?",
            "{legal|license|copyright} {question|terms|situation|status|details}{?|}",
            "under {which|what} {license|licence|permission|conditions} {is|was} {it|this|mlxrunner|the source|the code} {released|published|distributed|given away|available}?",
            "may {I|my company|we} {copy|ship|bundle|embed|reuse} {mlxrunner|this|the source|parts of it}?",
            "{what|which} {license|licence} {is it|is this|does it have|does mlxrunner have|does mlxrunner use|do you use|is mlxrunner under|applies}{ under|}?",
            "what is {the|your} {license|licence}{ of mlxrunner| of this project| of the code|}?",
            "{is|are} {mlxrunner|this|it|this project|the code} {free|open source|free software|open|gpl|mit|proprietary|apache licensed}?",
            "{can|may|am I allowed to|is it ok to} {use|sell|modify|fork|change|share|redistribute} {mlxrunner|it|this|the code|this code}{ at work| commercially| in my company| in a product|}?",
            "{license|licence|the license|licensing}{?|}",
            "how is {mlxrunner|the project|the code} licensed?",
            "what are the {license|licence|legal|usage} {terms|conditions}{ of the code|}?",
            "{does|what does} {it|mlxrunner} cost{ anything| money|}?",
        ),
        about=("the {license|licence|license terms}",),
    ),
    FactTemplate(
        weight=1.3,
        answers=("Run `make test` in the project folder. It runs the tests, offline.",),
        to=(
            "{run|start|execute|launch|do} {the tests|tests|all tests|the unit tests|its tests|pytest|the checks}{ of mlxrunner| of this project| myself|}",
            "{test|verify|check} {the code|my change|my changes|my edit|a change|the project|mlxrunner|that it works|that everything works|that all is well}",
            "{see|find out|make sure} {if|that|whether} {the code|everything|my change|all|my patch} {works|still works|is right|is correct}",
        ),
        asks=(
            "how do I {know|see|find out|make sure} {my change|my edit|my patch|an edit|the code} {is ok|is fine|works|did no harm|is safe|breaks nothing}?",
            "{before|when} I {send|submit|open|make} a {patch|pull request|change|commit}, {what should I run|how do I test|which tests are run|which command}?",
            "how {do|does|would|should} {developers|contributors|I|one} {run|execute|start} the {tests|test suite|checks}?",
            "{did I|have I|does my edit} {break|broken|damage} {something|anything|it}?",
            "{make target|command|target} for {tests|testing|the test suite}?",
            "{what|which} {command|make target|target} {runs|starts|executes} the tests?",
            "how {is|are} {the project|mlxrunner|the code|changes|the server} tested?",
            "how {do|are} the tests {run|work|started}?",
            "are there {tests|any tests|unit tests}?",
            "I {edited|changed|modified|wrote|patched} {some code|the code|something|a line|a module}, {how do I test it|does it still work|how can I test|how do I check it}?",
        ),
        about=("{the tests|make test|testing|unit tests|the test command}",),
    ),
    FactTemplate(
        weight=1.4,
        answers=(
            "Run `make builtin`. It trains me again on the CPU with tools/builtin_model/train.py, in "
            "less than an hour.",
        ),
        to=(
            "{train|retrain|rebuild|re-train|regenerate|recreate|remake} {you|you again|the built-in model|the builtin model|the small model|your weights|the model|this model|a model like you|a new version of you}",
            "{make|build|create|produce} {your weights|the built-in weights|a new built-in model|the builtin model}{ again| myself|}",
            "repeat your training",
        ),
        asks=(
            "{could|can|may} I {repeat|redo|reproduce|run} {your training|how you were made|the training|the training run}{ myself| at home|}?",
            "how did {your weights|you|this model|these weights} {come to be|come about|get made|get here|appear}?",
            "how {long|many hours} does {your training|training you|making you} take?",
            "can {I|we|one} {train|teach|make|build|fine-tune} {you|a new builtin|the small model|this little thing|the tiny model}{ again| anew| once more| on my machine| from nothing|}?",
            "{which|what} {command|target|line} {is for|starts|begins|does} {training|the training|your training|retraining}?",
            "I {changed|edited|extended} {your corpus|the corpus|the training data}, how do I {train again|get new weights|rebuild you}?",
            "{what|which} {command|make target|script} {trains|retrains|makes|made|builds|rebuilds} {you|the built-in model|your weights|the builtin model}?",
            "how {were|are} you {trained|made|built|created}?",
            "{where|how} {do|did} your weights come from?",
            "{can you be|how are you|could you be} {trained again|retrained|improved|rebuilt}?",
            "where is {your|the} training {code|script}?",
        ),
        about=("{your training|make builtin|the training script|retraining|how you were trained}",),
    ),
)
