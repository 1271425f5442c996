//! Checks that the files, commands, tests and metrics that the documents name exist.

use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The paths of the files under a folder.
fn files(folder: &str) -> Vec<String> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(root().join(folder)).expect("the folder") {
        let entry = entry.expect("an entry");
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = if folder == "." { name } else { format!("{folder}/{name}") };
        if path == "target" || path.starts_with('.') {
            continue;
        }
        if entry.path().is_dir() {
            all.extend(files(&path));
        } else {
            all.push(path);
        }
    }
    all
}

/// The source files under a folder, one after the other.
fn sources(folder: &str) -> String {
    let files = files(folder);
    files.iter().filter(|path| path.ends_with(".rs")).map(|path| read(path)).collect()
}

/// The documents about the project as it is, each with its text.
fn documents() -> Vec<(String, String)> {
    let is_document = |path: &String| path.ends_with(".md") && path != "CHANGELOG.md";
    let paths = files(".").into_iter().filter(is_document);
    paths.map(|path| (path.clone(), read(&path))).collect()
}

/// What stands between backquotes in a line.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.lines().flat_map(|line| line.split('`').skip(1).step_by(2))
}

/// The words of a document that look like the name of a metric of dlock.
fn metrics(text: &str) -> Vec<&str> {
    let words = text.split(|c: char| !c.is_ascii_lowercase() && c != '_');
    let ends = ["_total", "_seconds", "_seconds_bucket"];
    words
        .filter(|word| word.starts_with("dlock_") && ends.iter().any(|end| word.ends_with(end)))
        .collect()
}

#[test]
fn dashboards_and_alerts_show_metrics_that_exist() {
    let source = sources("dlock-core/src") + &sources("dlock-segment/src");
    let known: Vec<&str> = metrics(&source);
    for path in ["grafana-dashboard.json", "prometheus-rules.yaml"] {
        let text = read(&format!("docs/observability/{path}"));
        let used = metrics(&text);
        assert!(used.len() > 5, "{path} shows nothing");
        for name in used {
            let name = name.trim_end_matches("_bucket");
            assert!(known.contains(&name), "{path}: {name} does not exist");
        }
    }
    let dashboard: Result<serde_json::Value, _> =
        serde_json::from_str(&read("docs/observability/grafana-dashboard.json"));
    assert!(dashboard.is_ok(), "{dashboard:?}");
}

#[test]
fn links_lead_somewhere() {
    for (document, text) in documents() {
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let path = link.split('#').next().unwrap_or_default();
            if path.is_empty() || path.contains("://") || path.contains(' ') {
                continue;
            }
            let target = root().join(&document).with_file_name("").join(path);
            assert!(target.exists(), "{document}: {link} leads nowhere");
        }
    }
}

#[test]
fn named_files_exist() {
    let (files, mut checked) = (files("."), 0);
    let endings = [".rs", ".lua", ".sql", ".acl", ".java", ".py", ".yaml"];
    for (document, text) in documents() {
        for name in quoted(&text).filter(|name| endings.iter().any(|end| name.ends_with(end))) {
            let is_path = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
            if name.starts_with('.') || !name.chars().all(is_path) {
                continue;
            }
            let below = format!("/{name}");
            let exists = files.iter().any(|file| file == name || file.ends_with(&below));
            assert!(exists, "{document}: there is no file {name}");
            checked += 1;
        }
    }
    assert!(checked > 50, "{checked} names of files");
}

#[test]
fn commands_name_targets_that_exist() {
    let (files, mut checked) = (files("."), 0);
    for (document, text) in documents() {
        for command in text.split("cargo ").skip(1) {
            let command = command.split(['\n', '`', '|']).next().unwrap_or_default();
            let words: Vec<&str> = command.split_whitespace().collect();
            let after = |option: &str| {
                let places = words.windows(2).filter(|pair| pair[0] == option).map(|pair| pair[1]);
                places.map(str::to_owned).collect::<Vec<String>>()
            };
            let package = after("-p").pop().unwrap_or_else(|| "dlock-cli".into());
            let folder = if package == "dlock-bench" { "benches".into() } else { package };
            let kinds = ["tests", "src/bin", "benches", "examples"];
            for (option, kind) in ["--test", "--bin", "--bench", "--example"].iter().zip(kinds) {
                for name in after(option) {
                    let exists = [format!("{name}.rs"), format!("{name}/main.rs")]
                        .iter()
                        .any(|file| files.contains(&format!("{folder}/{kind}/{file}")));
                    assert!(exists, "{document}: `cargo {command}`: there is no {name}");
                    checked += 1;
                }
            }
        }
    }
    assert!(checked > 50, "{checked} targets");
}

/// `row_22` is the beginning of a name, and `nested` is a part of one.
#[test]
fn tests_of_the_faults_exist() {
    let source = sources(".");
    let functions: Vec<&str> = source
        .split("fn ")
        .skip(1)
        .filter_map(|rest| rest.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next())
        .collect();
    let text = read("docs/faults.md");
    let is_name = |name: &&str| {
        name.contains('_')
            && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
    };
    let names: Vec<&str> = quoted(&text).filter(is_name).collect();
    assert!(names.len() > 100, "{} names of tests", names.len());
    for name in names {
        assert!(functions.iter().any(|it| it.contains(name)), "faults.md: there is no {name}");
    }
}
