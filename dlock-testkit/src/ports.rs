//! Ports for the servers that tests start.
//!
//! A port that the kernel chooses may be given to another server or to an outgoing connection
//! before the server has started that it was meant for; a test would then talk to the wrong
//! server. So these are from below the range of the kernel, and each has its turn before one
//! comes again, in all processes together.

use std::fs::File;
use std::io::{Read as _, Seek as _, Write as _};
use std::net::TcpListener;

use rustix::fs::{FlockOperation, flock};

const FIRST: u16 = 12_000;
const COUNT: u16 = 10_000;
/// The bus of a server in a Redis Cluster has the port of the server and this much.
const BUS: u16 = 10_000;

/// A port on which a server can listen, and a free one for its bus.
///
/// # Panics
/// If there is none, or if the file of the next one cannot be used.
pub fn free_port() -> u16 {
    let name = format!("dlock-test-ports-{}", rustix::process::getuid().as_raw());
    let path = std::env::temp_dir().join(name);
    let file = File::options().read(true).write(true).create(true).truncate(false).open(path);
    let mut file = file.expect("a file for the next port");
    flock(&file, FlockOperation::LockExclusive).expect("the file is locked");
    let mut text = String::new();
    file.read_to_string(&mut text).expect("the file is read");
    let next: u16 = text.trim().parse().unwrap_or_else(|_| rand::random_range(0..COUNT));
    let is_free = |port: u16| TcpListener::bind(("127.0.0.1", port)).is_ok();
    let mut turns = (0..COUNT).map(|n| (next % COUNT + n) % COUNT);
    let turn = turns.find(|turn| is_free(FIRST + turn) && is_free(FIRST + turn + BUS));
    let turn = turn.expect("a free port");
    file.rewind().expect("the file is written");
    file.set_len(0).expect("the file is written");
    write!(file, "{}", turn + 1).expect("the file is written");
    FIRST + turn
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn no_port_is_given_twice() {
        let threads: Vec<_> = (0..4)
            .map(|_| std::thread::spawn(|| (0..50).map(|_| free_port()).collect::<Vec<_>>()))
            .collect();
        let ports = threads.into_iter().flat_map(|thread| thread.join().expect("the ports"));
        let distinct: HashSet<u16> = ports.collect();
        assert_eq!(distinct.len(), 200);
    }
}
