use dlock::key;

fn main() {
    let id = 7;
    let _ = key!("order:{}", id);
}
