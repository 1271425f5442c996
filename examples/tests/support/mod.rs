//! Starts examples, and sends requests to those that serve HTTP.

#![allow(dead_code, reason = "each test file uses a part of it")]

pub(crate) mod browser;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// An example, without the `DLOCK_` variables of the environment of the tests.
pub(crate) fn example(program: &str, url: Option<&str>) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("DLOCK_") {
            command.env_remove(name);
        }
    }
    if let Some(url) = url {
        command.env("DLOCK_URL", url);
    }
    command
}

/// An example that serves HTTP; killed when dropped.
pub(crate) struct Service {
    process: Child,
    pub(crate) address: String,
}

impl Service {
    /// Starts the example on a free port.
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut process = command
            .env("PORT", "0")
            .stdout(Stdio::piped())
            .spawn()
            .expect("the example can be run");
        let mut line = String::new();
        let output = process.stdout.take().expect("its output");
        BufReader::new(output).read_line(&mut line).expect("a line");
        let address = line.trim().strip_prefix("listening on http://").expect("its address");
        Service { address: address.to_owned(), process }
    }

    /// Sends a request and returns status and body.
    pub(crate) fn ask(&self, method: &str, path: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.address).expect("it listens");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a time-out");
        let host = &self.address;
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        )
        .expect("the request");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        let status = answer.split(' ').nth(1).expect("a status").parse().expect("a number");
        let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
        (status, body.to_owned())
    }
}

impl Service {
    /// Tells the example to stop with SIGTERM, and waits until it has ended with success.
    pub(crate) fn stop(mut self) {
        let id = self.process.id().to_string();
        let sent = Command::new("kill").args(["-TERM", &id]).status();
        assert!(sent.expect("kill can be run").success());
        let ended = self.process.wait().expect("it ends");
        assert!(ended.success(), "{ended}");
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
