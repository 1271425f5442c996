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

    /// Whether it is a cluster.
    pub(crate) fn is_cluster(&self) -> bool {
        self.route.server().is_none()
    }

    /// The server that serves a key of this name; empty if there is only one.
    pub(crate) async fn server_of(&self, name: &str) -> Result<String> {
        self.route.server_of(Operation::Inventory, name).await
    }

    /// Sends a command on a key of this name, without a time-out.
    pub(crate) async fn command_for_extension(
        &self,
        name: &str,
        command: &[&[u8]],
    ) -> Result<Value> {
        self.route.command(Operation::Inventory, name, &of_words(command)).await
    }

    /// Sends a command to every server that has keys, without a time-out.
    pub(crate) async fn command_everywhere(&self, command: &[&[u8]]) -> Result<Vec<Value>> {
        let mut answers = Vec::new();
        for (_, link) in self.route.servers(Operation::Inventory).await? {
            answers.push(link.command(Operation::Inventory, &of_words(command)).await?);
        }
        Ok(answers)
    }

    /// Runs a script at the server of its first key, without a time-out. In a cluster all
    /// its keys must be declared, in one slot, and exist: else a slot that moves would refuse
    /// some of them half-way.
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
        match self.route.server() {
            Some(server) => server.run(Operation::Inventory, &run).await,
            None => {
                let name = keys.first().copied().unwrap_or_default();
                self.route.run(Operation::Inventory, name, &run).await.map(|(_, answer)| answer)
            }
        }
    }
}

fn of_words(command: &[&[u8]]) -> redis::Cmd {
    let mut sent = redis::Cmd::new();
    for word in command {
        sent.arg(word);
    }
    sent
}
