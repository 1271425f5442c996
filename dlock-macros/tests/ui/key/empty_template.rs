use dlock::key;

fn main() {
    let _ = key!("");
}
