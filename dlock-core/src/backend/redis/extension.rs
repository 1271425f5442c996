//! Scripts of crates built beside the lock, on its connection.

use redis::Value;

use super::Redis;
use super::scripts::Code;
use crate::error::{Operation, Result};
use crate::key::Key;

/// A script and its digest.
pub struct Script(Code);

impl Script {
    /// A script with this text.
    pub fn new(text: &'static str) -> Self {
        Script(Code::new(text))
    }
}

impl std::fmt::Debug for Script {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Script")
    }
}

impl Redis {
    /// The name of what is kept beside the lock of this key.
    pub(crate) fn name_for_extension(&self, key: &Key) -> String {
        let mut name = self.names.state(key, false);
        name.pop();
        name.push('i');
        name
    }

    /// Sends one command, without a time-out.
    pub(crate) async fn command_for_extension(&self, command: &[&[u8]]) -> Result<Value> {
        let mut sent = redis::Cmd::new();
        for word in command {
            sent.arg(word);
        }
        self.link.command(Operation::Inventory, &sent).await
    }

    /// Runs a script, without a time-out.
    pub(crate) async fn run_for_extension(
        &self,
        script: &'static Script,
        keys: &[&str],
        arguments: &[&[u8]],
    ) -> Result<Value> {
        let mut run = script.0.on(keys.len());
        run.arg(keys);
        for argument in arguments {
            run.arg(argument);
        }
        self.link.run(Operation::Inventory, &run).await
    }
}
