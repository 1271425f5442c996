//! The Lua scripts: what is sent, and `EVALSHA` answered by `NOSCRIPT`.

use std::sync::OnceLock;

use redis::{Arg, Cmd, Script, ToRedisArgs};

macro_rules! parts {
    ($($file:literal),*) => { concat!($(include_str!(concat!("lua/", $file, ".lua"))),*) };
}

const CALLS: &str = parts!("mint", "calls_first", "common", "calls");
const BREAK: &str = parts!("mint", "common", "break");
const INSPECT: &str = parts!("mint", "common", "inspect");

/// The scripts with their digests.
pub(super) struct Scripts {
    /// Acquires, renewals and releases.
    pub(super) calls: Code,
    pub(super) break_lock: Code,
    pub(super) inspect: Code,
}

impl Scripts {
    pub(super) fn get() -> &'static Scripts {
        static SCRIPTS: OnceLock<Scripts> = OnceLock::new();
        SCRIPTS.get_or_init(|| Scripts {
            calls: Code::new(CALLS),
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
    pub(super) fn on<K: ToRedisArgs>(&'static self, keys: impl ExactSizeIterator<Item = K>) -> Run {
        let mut by_digest = redis::cmd("EVALSHA");
        by_digest.arg(&self.digest).arg(keys.len());
        for key in keys {
            by_digest.arg(key);
        }
        Run { code: self, by_digest }
    }
}

/// A script with its keys and arguments.
pub(super) struct Run {
    code: &'static Code,
    by_digest: Cmd,
}

impl Run {
    pub(super) fn arg(mut self, argument: impl ToRedisArgs) -> Self {
        self.by_digest.arg(argument);
        self
    }

    /// Adds the words of a command.
    pub(super) fn say(&mut self, words: &Cmd) {
        for word in words.args_iter() {
            if let Arg::Simple(word) = word {
                self.by_digest.arg(word);
            }
        }
    }

    /// By digest, which the server knows after the first time.
    pub(super) fn by_digest(&self) -> &Cmd {
        &self.by_digest
    }

    /// With its text, for a server that answered `NOSCRIPT`.
    pub(super) fn by_text(&self) -> Cmd {
        let mut by_text = redis::cmd("EVAL");
        by_text.arg(self.code.text);
        for argument in self.by_digest.args_iter().skip(2) {
            if let Arg::Simple(argument) = argument {
                by_text.arg(argument);
            }
        }
        by_text
    }
}
