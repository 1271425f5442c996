//! The process of a server that a test starts: in a temporary directory, on a free loopback
//! port, ended by its own process id.

use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::ports::free_port;

/// How long a server may take to start.
pub(crate) const START: Duration = Duration::from_secs(60);

/// A server process, and how it is started again.
#[derive(Debug)]
pub(crate) struct Server {
    name: &'static str,
    process: Option<Child>,
    pub(crate) port: u16,
    directory: PathBuf,
    pub(crate) command: Vec<String>,
}

impl Server {
    pub(crate) fn new(name: &'static str) -> Self {
        static STARTED: AtomicU64 = AtomicU64::new(0);
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let directory = format!("dlock-{name}-{}-{number}", std::process::id());
        let directory = std::env::temp_dir().join(directory);
        let _ = std::fs::remove_dir_all(&directory);
        std::fs::create_dir_all(&directory).expect("a directory for the server");
        Server { name, process: None, port: free_port(), directory, command: Vec::new() }
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.directory.join(name).to_str().expect("a path").to_owned()
    }

    /// Starts the process and waits until it accepts connections. After a kill the files
    /// may be in use for a moment.
    ///
    /// # Panics
    /// If it does not start.
    pub(crate) fn launch(&mut self) {
        let began = Instant::now();
        while !self.try_launch() {
            assert!(
                began.elapsed() < START,
                "{} does not start: {}",
                self.name,
                std::fs::read_to_string(self.path("log")).unwrap_or_default()
            );
            self.kill();
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    fn try_launch(&mut self) -> bool {
        let log = std::fs::File::options().create(true).append(true).open(self.path("log"));
        let log = log.expect("a log file");
        let process = Command::new(&self.command[0])
            .args(&self.command[1..])
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("the log file"))
            .stderr(log)
            .spawn()
            .expect("the server can be run");
        self.process = Some(process);
        let address = SocketAddr::from(([127, 0, 0, 1], self.port));
        let began = Instant::now();
        while TcpStream::connect_timeout(&address, Duration::from_millis(100)).is_err() {
            let gone = self.process.as_mut().is_some_and(|it| !matches!(it.try_wait(), Ok(None)));
            if gone || began.elapsed() > START {
                return false;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        true
    }

    /// Whether the process was started, and not killed since.
    pub(crate) fn is_running(&self) -> bool {
        self.process.is_some()
    }

    pub(crate) fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }

    pub(crate) fn restart(&mut self) {
        self.kill();
        self.launch();
    }

    /// Stops the server with SIGSTOP, with all its processes.
    pub(crate) fn pause(&self) {
        self.processes().into_iter().for_each(crate::process::pause);
    }

    /// Lets a server go on that was paused.
    pub(crate) fn resume(&self) {
        self.processes().into_iter().for_each(crate::process::resume);
    }

    /// The process and those that it has started: PostgreSQL has one for each connection.
    fn processes(&self) -> Vec<u32> {
        let Some(first) = self.process.as_ref().map(Child::id) else { return Vec::new() };
        let children = format!("/proc/{first}/task/{first}/children");
        let children = std::fs::read_to_string(children).unwrap_or_default();
        let children = children.split_whitespace().filter_map(|id| id.parse().ok());
        std::iter::once(first).chain(children).collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// What a test started and has to end: one process with its files.
pub(crate) trait Process {
    fn process(&self) -> &Server;
    fn process_mut(&mut self) -> &mut Server;
}

/// What the servers have in common.
macro_rules! server {
    ($name:ident) => {
        impl crate::server_process::Process for $name {
            fn process(&self) -> &crate::server_process::Server {
                &self.0
            }

            fn process_mut(&mut self) -> &mut crate::server_process::Server {
                &mut self.0
            }
        }

        impl $name {
            /// Kills the server with SIGKILL. Its files stay.
            pub fn kill(&mut self) {
                self.0.kill();
            }

            /// Kills the server, and starts it again with its files on the same port.
            ///
            /// # Panics
            /// If the server does not start.
            pub fn restart(&mut self) {
                self.0.restart();
            }

            /// Stops the server with SIGSTOP, with all its processes.
            pub fn pause(&self) {
                self.0.pause();
            }

            /// Lets a server go on that was paused.
            pub fn resume(&self) {
                self.0.resume();
            }

            /// The port of the server.
            pub fn port(&self) -> u16 {
                self.0.port
            }

            /// The directory of the server.
            pub fn directory(&self) -> &std::path::Path {
                self.0.directory()
            }
        }
    };
}

pub(crate) use server;
