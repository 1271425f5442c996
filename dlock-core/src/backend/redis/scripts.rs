//! The Lua scripts: what is sent, and `EVALSHA` answered by `NOSCRIPT`.

use std::sync::OnceLock;

use redis::{Arg, Cmd, Script, ToRedisArgs};

/// A script of several files. Each file is a function inside the one before: Lua then finds the
/// locals of the files before at once, where it would walk through all of them for each function
/// that uses one. A call that somebody waits for takes a tenth less of the server's time.
macro_rules! parts {
    ($always_hash:literal, $first:literal $(, $file:literal)*) => {
        concat!(
            "local always_hash = ", $always_hash, "\n",
            include_str!(concat!("lua/", $first, ".lua")),
            $("\nreturn (function()\n", include_str!(concat!("lua/", $file, ".lua")),)*
            $(parts!(end $file)),*
        )
    };
    (end $file:literal) => { "\nend)()" };
}

macro_rules! scripts {
    ($always_hash:literal) => {
        Scripts {
            calls: Code::new(parts!(
                $always_hash,
                "calls_one",
                "numbers",
                "calls_handover",
                "calls_first",
                "state",
                "calls"
            )),
            break_lock: Code::new(parts!($always_hash, "numbers", "state", "break")),
            inspect: Code::new(parts!($always_hash, "numbers", "state", "inspect")),
        }
    };
}

/// The scripts with their digests.
pub(super) struct Scripts {
    /// Acquires, renewals and releases.
    pub(super) calls: Code,
    pub(super) break_lock: Code,
    pub(super) inspect: Code,
}

impl Scripts {
    /// For one server.
    pub(super) fn of_a_server() -> &'static Scripts {
        static SCRIPTS: OnceLock<Scripts> = OnceLock::new();
        SCRIPTS.get_or_init(|| scripts!("false"))
    }

    /// For a cluster, where a lock is always a hash.
    pub(super) fn of_a_cluster() -> &'static Scripts {
        static SCRIPTS: OnceLock<Scripts> = OnceLock::new();
        SCRIPTS.get_or_init(|| scripts!("true"))
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

    /// A run of it, whose first arguments will be this many keys.
    pub(super) fn on(&'static self, keys: usize) -> Run {
        let mut by_digest = Cmd::with_capacity(4 + 6 * keys, 256 * keys);
        by_digest.arg("EVALSHA").arg(&self.digest).arg(keys);
        Run { code: self, by_digest, word: String::new() }
    }
}

/// A script with its keys and arguments, as several servers are sent it.
pub(super) struct PackedRun {
    run: Run,
    request: Vec<u8>,
}

impl PackedRun {
    pub(super) fn run(&self) -> &Run {
        &self.run
    }

    /// By digest, as it is written to a connection.
    pub(super) fn request(&self) -> &[u8] {
        &self.request
    }
}

/// A script with its keys and arguments.
pub(super) struct Run {
    code: &'static Code,
    by_digest: Cmd,
    word: String,
}

impl Run {
    pub(super) fn arg(&mut self, argument: impl ToRedisArgs) -> &mut Self {
        self.by_digest.arg(argument);
        self
    }

    /// An argument that is put together in place.
    pub(super) fn write(&mut self, write: impl FnOnce(&mut String)) {
        self.word.clear();
        write(&mut self.word);
        self.by_digest.arg(&self.word);
    }

    /// Packed once, for several servers.
    pub(super) fn packed(self) -> PackedRun {
        let request = self.by_digest.get_packed_command();
        PackedRun { run: self, request }
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
