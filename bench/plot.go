package bench

import (
	"fmt"
	"image/color"
	"path/filepath"
	"slices"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
)

// plotted are the figures that WritePlots draws, one file each.
var plotted = []struct{ name, metric, title string }{
	{"iops", "iops", "commands per second"},
	{"latency-p50", "lat_p50", "median latency, us"},
	{"latency-p99", "lat_p99", "99th percentile of latency, us"},
	{"cpu", "cpu_per_io", "CPU time per command, us (initiator)"},
	{"notifications", "commands_per_notification", "commands per notification"},
}

// Colours that stay apart for colour-blind readers (Okabe and Ito).
var palette = []color.Color{
	color.RGBA{0x00, 0x72, 0xb2, 0xff}, color.RGBA{0xd5, 0x5e, 0x00, 0xff}, color.RGBA{0x00, 0x9e, 0x73, 0xff},
	color.RGBA{0xcc, 0x79, 0xa7, 0xff}, color.RGBA{0xe6, 0x9f, 0x00, 0xff}, color.RGBA{0x56, 0xb4, 0xe9, 0xff},
}

// WritePlots draws the report into dir, once per series and figure, as EXPERIMENT-SERIES-FIGURE.png and .svg: a
// line per variant through the medians, bars from minimum to maximum. It returns the files' names.
func (rep *Report) WritePlots(dir string) (files []string, err error) {
	var series []string
	for _, p := range rep.Points {
		if p.missing() == "" && !slices.Contains(series, p.Series) {
			series = append(series, p.Series)
		}
	}
	for _, s := range series {
		for _, f := range plotted {
			metric, _ := MetricNamed(f.metric)
			pl, err := rep.plot(s, metric, f.title)
			if err != nil {
				return files, err
			}
			if pl == nil {
				continue
			}
			base := strings.ReplaceAll(strings.ToLower(fmt.Sprintf("%s-%s-%s", rep.Experiment, s, f.name)), " ", "")
			for _, ext := range []string{".png", ".svg"} {
				name := filepath.Join(dir, base+ext)
				if err := pl.Save(16*vg.Centimeter, 10*vg.Centimeter, name); err != nil {
					return files, fmt.Errorf("bench: plot: %w", err)
				}
				files = append(files, name)
			}
		}
	}
	return files, nil
}

// curve is one variant's medians with their extremes.
type curve struct {
	plotter.XYs
	plotter.YErrors
}

// plot draws one metric of a series; nil when it has less than two points, or nothing but zeros.
func (rep *Report) plot(series string, metric Metric, title string) (*plot.Plot, error) {
	var curves []*curve
	var names []string
	highest := 0.0
	for _, p := range rep.Points {
		if p.missing() != "" || p.Series != series {
			continue
		}
		for k := range p.Variants {
			v := &p.Variants[k]
			if k == len(curves) {
				curves, names = append(curves, &curve{}), append(names, v.Name)
			}
			s := v.Spread(metric)
			highest = max(highest, s.Max)
			at, _ := slices.BinarySearchFunc(curves[k].XYs, p.X, func(a plotter.XY, x float64) int {
				switch {
				case a.X < x:
					return -1
				case a.X > x:
					return 1
				}
				return 0
			})
			curves[k].XYs = slices.Insert(curves[k].XYs, at, plotter.XY{X: p.X, Y: s.Median})
			curves[k].YErrors = slices.Insert(curves[k].YErrors, at, struct{ Low, High float64 }{s.Median - s.Min, s.Max - s.Median})
		}
	}
	if len(curves) == 0 || len(curves[0].XYs) < 2 || highest == 0 {
		return nil, nil
	}
	pl := plot.New()
	pl.Title.Text = fmt.Sprintf("%s, %s", rep.Title, series)
	pl.X.Label.Text, pl.Y.Label.Text = rep.XAxis, title
	pl.Y.Min = 0
	if rep.LogX {
		pl.X.Scale, pl.X.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
	}
	pl.Legend.Top = true
	pl.Legend.Left = true
	pl.Add(plotter.NewGrid())
	for k, c := range curves {
		line, points, err := plotter.NewLinePoints(c)
		if err != nil {
			return nil, fmt.Errorf("bench: plot: %w", err)
		}
		bars, err := plotter.NewYErrorBars(c)
		if err != nil {
			return nil, fmt.Errorf("bench: plot: %w", err)
		}
		col := palette[k%len(palette)]
		line.Color, points.Color, bars.LineStyle.Color = col, col, col
		pl.Add(line, points, bars)
		pl.Legend.Add(names[k], line, points)
	}
	pl.Y.Min = 0
	pl.Y.Max = max(pl.Y.Max, highest*1.15)
	return pl, nil
}
