//! The Lua scripts: what is sent, and `EVALSHA` answered by `NOSCRIPT`.

use std::sync::OnceLock;

use redis::{Cmd, Script, ToRedisArgs};

macro_rules! parts {
    ($($file:literal),*) => { concat!($(include_str!(concat!("lua/", $file, ".lua"))),*) };
}

const ACQUIRE: &str = parts!("mint", "acquire_first", "common", "acquire");
const RENEW: &str = parts!("mint", "renew_first", "common", "renew");
const RELEASE: &str = parts!("mint", "release_first", "common", "release");
const BREAK: &str = parts!("mint", "common", "break");
const INSPECT: &str = parts!("mint", "common", "inspect");

/// The scripts with their digests.
pub(super) struct Scripts {
    pub(super) acquire: Code,
    pub(super) renew: Code,
    pub(super) release: Code,
    pub(super) break_lock: Code,
    pub(super) inspect: Code,
}

impl Scripts {
    pub(super) fn get() -> &'static Scripts {
        static SCRIPTS: OnceLock<Scripts> = OnceLock::new();
        SCRIPTS.get_or_init(|| Scripts {
            acquire: Code::new(ACQUIRE),
            renew: Code::new(RENEW),
            release: Code::new(RELEASE),
            break_lock: Code::new(BREAK),
            inspect: Code::new(INSPECT),
        })
    }
}

/// One script.
pub(super) struct Code {
    text: &'static str,
    digest: String,
}

impl Code {
    pub(super) fn new(text: &'static str) -> Self {
        Code { text, digest: Script::new(text).get_hash().to_owned() }
    }

    /// A run of it on these keys.
    pub(super) fn on<K: ToRedisArgs>(&'static self, keys: &[K]) -> Run {
        let mut run = Run { code: self, arguments: Vec::with_capacity(keys.len() + 16) };
        run.push(keys.len());
        keys.iter().for_each(|key| run.push(key));
        run
    }
}

/// A script with its keys and arguments.
pub(super) struct Run {
    code: &'static Code,
    arguments: Vec<Vec<u8>>,
}

impl Run {
    fn push(&mut self, argument: impl ToRedisArgs) {
        self.arguments.extend(argument.to_redis_args());
    }

    pub(super) fn arg(mut self, argument: impl ToRedisArgs) -> Self {
        self.push(argument);
        self
    }

    /// By digest, which the server knows after the first time.
    pub(super) fn by_digest(&self) -> Cmd {
        self.command("EVALSHA", &self.code.digest)
    }

    /// With its text, for a server that answered `NOSCRIPT`.
    pub(super) fn by_text(&self) -> Cmd {
        self.command("EVAL", self.code.text)
    }

    fn command(&self, name: &str, script: &str) -> Cmd {
        let mut command = redis::cmd(name);
        command.arg(script).arg(&self.arguments);
        command
    }
}
